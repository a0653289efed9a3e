"""The script that completes a command line: sourced by the shell, and asked as the shell asks it."""

import shutil
import subprocess

import pytest

from kway.cli._grammar import grammar
from kway.cli._shells import SHELLS, bash, fish, zsh
from kway.cli.completion import EXACTNESS, LR_SCALES, STRATEGIES, values
from kway.cli.main import commands, main
from kway.step.scaling import RULES
from kway.strategies.layout import axes
from kway.strategies.levels import LEVELS

ASK = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
_kway 2>/dev/null
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("completion") / "kway.bash"
    path.write_text(bash(grammar(), values()))
    return path


@pytest.fixture
def offered(script):
    if shutil.which("bash") is None:
        pytest.skip("no bash")

    def ask(*words):
        done = subprocess.run(
            ["bash", "--norc", "-c", ASK, "ask", script, "kway", *words],
            capture_output=True,
            text=True,
            check=True,
            timeout=20,
        )
        assert done.stderr == ""
        return done.stdout.split()

    return ask


def test_the_first_word_is_a_command(offered):
    assert offered("") == [*commands(), "--help", "--version"]
    assert offered("pr") == ["profile", "predict", "prove"]


@pytest.mark.parametrize("command", grammar(), ids=lambda command: command.name)
def test_every_flag_of_every_command_is_offered(command, offered):
    flags = [name for flag in command.flags for name in flag.names]
    assert offered(command.name, "-") == flags


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["train", "le"], ["lenet"]),
        (["train", "lenet", "--exactness", ""], list(EXACTNESS)),
        (["train", "lenet", "--exactness", "=", "b"], ["bits"]),
        (["train", "--data", "fa"], ["fashion-mnist"]),
        (["train", "lenet", "--lr", ""], []),
        (["prove", "lenet", "--against", ""], []),
        (["train", "lenet", "--timeline", "--js"], ["--json"]),
        (["completion", "z"], ["zsh"]),
        (["train", "lenet", "--lr-scale", ""], ["linear", "sqrt"]),
        (["train", "lenet", "--strategy", ""], ["auto", *STRATEGIES]),
        (["plan", "lenet", "--strategy", "au"], ["auto"]),
        (["plan", "lenet", "--step-kind", "a"], ["auto"]),
        # What is proved is named.
        (["prove", "lenet", "--strategy", ""], list(STRATEGIES)),
        (["prove", "lenet", "--step-kind", "a"], []),
        (["train", "lenet", "--tracker", ""], ["tensorboard", "wandb", "mlflow"]),
        (["plan", "lenet", "--on", "8x"], ["8xa100", "8xh100"]),
        (["data", ""], ["list", "fetch"]),
        (["data", "--data-dir", "d", "fe"], ["fetch"]),
        (["data", "--data-dir", "=", "d", "fe"], ["fetch"]),
        (["data", "fetch", ""], ["cifar10", "fashion-mnist", "mnist"]),
        (["data", "fetch", "mnist", "ci"], ["cifar10"]),
        (["nonsense", "--"], []),
        (["launch", "--dev"], ["--devices"]),
        (["launch", "--devices", "cpu:2", "--log"], ["--logs"]),
        (["launch", "--devices", "cpu:2", "--lo"], ["--logs", "--local-rank", "--local_rank"]),
        # What follows the script is its own.
        (["launch", "--devices", "cpu:2", "script.py", "--lo"], []),
    ],
)
def test_what_is_offered(words, found, offered):
    assert offered(*words) == found


def test_what_is_offered_is_what_there_is():
    assert set(EXACTNESS) == set(LEVELS)
    assert set(STRATEGIES) == {"single", *axes()}
    assert set(LR_SCALES) == set(RULES)
    taken = {(c.name, a.dest) for c in grammar() for a in (*c.flags, *c.places)}
    for command, dest in values():
        assert any(dest == own and command in ("", of) for of, own in taken), (command, dest)


@pytest.mark.parametrize("shell", [zsh, fish])
def test_a_command_with_names_of_its_own_is_offered_those_in_other_shells(shell):
    strategies = {
        command.name: line
        for command in grammar()
        if any(flag.dest == "strategy" for flag in command.flags)
        for line in shell([command], values()).splitlines()
        if "strategy" in line and "single data threads" in line
    }
    assert "auto single" in strategies["train"]
    assert "auto single" not in strategies["prove"]


# What values are that have no names: numbers, lengths of time, places, and what a user's own code calls things.
FREE = {
    "N", "X", "S", "T", "N,N[,N]", "DURATION", "SET", "URL", "SCRIPT", "ARGUMENTS", "MiB", "NAME=VALUE[,...]"
}  # fmt: skip
OWN = {"save_best", "early_stop"}


def test_arguments_that_are_one_of_some_names_are_offered_with_them():
    for command in grammar():
        named = {
            flag.dest for flag in command.flags if flag.value and not flag.path and flag.value not in FREE
        } | {place.dest for place in command.places if place.name not in FREE}
        assert named - OWN <= {dest for of, dest in values() if of in ("", command.name)}, command.name


@pytest.mark.parametrize("shell", SHELLS)
def test_each_shell_has_every_command_and_flag(shell, capsys):
    assert main(["completion", shell]) == 0
    text = capsys.readouterr().out
    for command in grammar():
        for name in (name for flag in command.flags for name in flag.names):
            short = f"-s {name[1:]}" if not name.startswith("--") else f"-l {name[2:]}"
            assert (short if shell == "fish" else name) in text


def test_names_of_a_later_place_are_offered_there():
    text = zsh(grammar(), values())
    assert '1:WHAT: _alternative "names:name:(list fetch)"' in text
    assert '*:NAME: _alternative "names:name:(cifar10 ' in text
    lines = [line for line in fish(grammar(), values()).splitlines() if "from data; and" in line]
    assert [("not __fish" in line, line.rpartition(" -a ")[2][:6]) for line in lines] == [
        (True, "'list "), (False, "'cifar"),
    ]  # fmt: skip


@pytest.mark.parametrize(("shell", "check", "write"), [("zsh", "-n", zsh), ("fish", "--no-execute", fish)])
def test_other_shells_can_read_their_scripts(shell, check, write, tmp_path):
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell}")
    path = tmp_path / f"kway.{shell}"
    path.write_text(write(grammar(), values()))
    subprocess.run([shell, check, path], check=True, timeout=20)


def test_an_unknown_shell_is_refused(capsys):
    assert main(["completion", "bahs"]) == 2
    assert "did you mean 'bash'?" in capsys.readouterr().err
