import os
import statistics
import subprocess
import sys
import time

import pytest

from kway.cli import devices
from kway.cli._grammar import grammar
from kway.cli._synonyms import _ELSEWHERE, _IN_A_JOB
from kway.cli.main import commands, main
from kway.errors import KwayError, NonFiniteError, RankError, UsageError

LOADED = "import sys; heavy = {'torch', 'numpy', 'matplotlib'} & set(sys.modules); assert not heavy, heavy"


def python(code, **options):
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60, **options
    )


def test_help_lists_every_command(capsys):
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    for name in commands():
        assert f"\n  {name} " in out
    assert devices.HELP in out
    assert "usage: kway [-h] [--version] COMMAND" in out


def test_commands_come_in_a_sensible_order():
    names = commands()
    assert names[0] == "devices"
    assert "main" not in names
    assert "options" not in names
    assert not [name for name in names if name.startswith("_")]


def test_no_command_shows_the_help_and_fails(capsys):
    assert main([]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "commands:" in captured.err


@pytest.mark.parametrize("words", [["devics"], ["devics", "--json"]])
def test_unknown_command_names_the_nearest(capsys, words):
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "did you mean 'devices'?" in captured.err


@pytest.mark.parametrize(
    ("word", "said"),
    [("report", "'report' is announced, but not there yet"), ("serve", "known are")],
)
def test_what_is_far_from_every_command_gets_no_guess(capsys, word, said):
    assert main([word]) == 2
    found = capsys.readouterr().err
    assert said in found
    assert "did you mean" not in found


@pytest.mark.parametrize("words", [["--bogus"], ["devices", "--bogus"], ["devices", "--js"]])
def test_unknown_flags(capsys, words):
    assert main(words) == 2
    assert words[-1] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "offered"),
    [
        ("train", {"--loss", "--optimizer", "--lr", "--init"}),
        ("prove", {"--loss", "--optimizer", "--lr", "--init"}),
        ("evaluate", {"--loss"}),
        ("predict", set()),
    ],
)
def test_commands_offer_the_flags_that_they_use(name, offered, capsys):
    assert main([name, "--help"]) == 0
    words = set(capsys.readouterr().out.split())
    assert words & {"--loss", "--optimizer", "--lr", "--init"} == offered
    for flag in {"--loss", "--optimizer", "--init"} - offered:
        assert main([name, "mlp", "--weights", "w.safetensors", flag, "x"]) == 2
        assert f"unknown flag {flag};" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("train", "auto: the fastest, by a plan"),
        *((name, "auto: data over the devices") for name in ("tune", "evaluate", "predict")),
    ],
)
def test_what_an_automatic_strategy_is_for_a_command_is_in_its_help(name, said, capsys):
    assert main([name, "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert said in shown
    assert ("no plan is made" in shown) == (name != "train")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "train mlp --bach-size 64",
            "unknown flag --bach-size; did you mean --batch-size? see kway train --help",
        ),
        (
            "train --bach-size=64 mlp",
            "unknown flag --bach-size; did you mean --batch-size? see kway train --help",
        ),
        ("train mlp --batch-size abc", "--batch-size abc: it must be a whole number; see kway train --help"),
        ("train mlp --epochs 1.5", "--epochs 1.5: it must be a whole number; see kway train --help"),
        ("train mlp --lr fast", "--lr fast: it must be a number; see kway train --help"),
        ("train mlp --lr", "--lr expected one argument; see kway train --help"),
        ("train mlp lenet", "'lenet' is one argument too many; see kway train --help"),
        (
            "predict mlp",
            "--weights is missing: a run's folder, or a safetensors file; see kway predict --help",
        ),
        (
            "predict mlp --weigths x",
            "unknown flag --weigths; did you mean --weights? see kway predict --help",
        ),
        ("launch", "SCRIPT is missing: a Python file, or with -m a module; see kway launch --help"),
        (
            "launch --device 2 x.py --lr",
            "unknown flag --device; did you mean --devices? see kway launch --help",
        ),
        ("--bogus", "unknown flag --bogus; see kway --help"),
    ],
)
def test_arguments_that_cannot_be_read_are_one_error(capsys, line, said):
    assert main(line.split()) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == f"kway: error: {said}\n"


@pytest.mark.parametrize(
    ("command", "flag", "own"),
    [
        ("train", "--learning-rate", "--lr"),
        ("train", "--learning_rate=1", "--lr"),
        ("train", "--batch_size", "--batch-size"),
        ("train", "--batch", "--batch-size"),
        ("train", "--epoch", "--epochs"),
        ("train", "--gpus", "--devices"),
        ("train", "--num-workers", "--workers"),
        ("train", "--seed-everything", "--seed"),
        ("train", "--max_grad_norm", "--clip-norm"),
        ("evaluate", "--checkpoint", "--weights"),
    ],
)
def test_a_flag_of_another_tool_is_told_by_its_name_here(capsys, command, flag, own):
    assert main([command, "mlp", flag, "1"]) == 2
    name = flag.partition("=")[0]
    assert f"unknown flag {name}; did you mean {own}? see" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "why"),
    [
        ("--max-lr", "a schedule of the learning rate is part of a Job, as schedule="),
        ("--schedule=cosine", "a schedule of the learning rate is part of a Job, as schedule="),
        ("--lr_scheduler_type", "a schedule of the learning rate is part of a Job, as schedule="),
        ("--weight-decay", "options of an optimizer are part of a Job, as optimizer="),
    ],
)
def test_a_flag_for_what_stands_in_a_job_is_told_where(capsys, flag, why):
    assert main(["train", "mlp", flag, "1"]) == 2
    said = capsys.readouterr().err
    assert f"unknown flag {flag.partition('=')[0]}: {why}; make a Job in a file of your own" in said
    assert "docs/guide/your-own-model.md" in said
    assert "did you mean" not in said


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["lenet", "--optimizer", "AdamW"], "'adamw'"),
        (["lenet", "--optimizer", "adamW"], "'adamw'"),
        (["LeNet"], "'lenet'"),
        (["lenet", "--Epochs", "1"], "--epochs"),
    ],
)
def test_a_name_in_other_letters_is_told_before_one_that_is_merely_like_it(capsys, words, meant):
    assert main(["train", *words]) == 2
    assert f"did you mean {meant}?" in capsys.readouterr().err


def test_only_flags_that_the_command_has_are_advised(capsys):
    assert main(["predict", "mlp", "--weights", "w", "--learning-rate", "1"]) == 2
    assert "unknown flag --learning-rate; see kway predict --help" in capsys.readouterr().err
    flags = {flag for command in grammar() for each in command.flags for flag in each.names}
    assert set(_ELSEWHERE) <= flags
    names = [name for table in (_ELSEWHERE, _IN_A_JOB) for names in table.values() for name in names]
    assert len(names) == len(set(names))


def test_help_of_one_command(capsys):
    assert main(["devices", "--help"]) == 0
    assert "usage: kway devices" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("error", "code", "last"),
    [
        (KwayError("a", "b", "c"), 1, "kway: error: a: b; c"),
        (UsageError("bad"), 2, "kway: error: bad"),
        (NonFiniteError("loss is nan"), 1, "kway: error: loss is nan"),
        (RankError(1, 137, "killed"), 137, "kway: error: rank 1 failed: killed"),
        (RankError(2, 1, "boom", "Traceback\n  line\n"), 1, "kway: error: rank 2 failed: boom"),
        (KeyboardInterrupt(), 130, "kway: interrupted"),
        # Only code of the user's own leaves so: 0 would pass for success.
        (SystemExit(0), 1, "kway: error: left with exit code 0 before the work was done"),
        (SystemExit(4), 4, "kway: error: left with exit code 4 before the work was done"),
        (SystemExit("no data"), 1, "kway: error: left saying 'no data' before the work was done"),
    ],
)
def test_errors_become_messages_and_exit_codes(monkeypatch, capsys, error, code, last):
    def fail(args):
        raise error

    monkeypatch.setattr(devices, "run", fail)
    assert main(["devices"]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines()[-1] == last
    assert captured.err.count(last) == 1
    if isinstance(error, RankError) and error.traceback:
        assert captured.err.startswith("Traceback\n  line\n")
        assert captured.err.count("Traceback") == 1


def test_what_is_noted_of_a_failed_rank_is_said_before_its_cause(monkeypatch, capsys):
    def fail(args):
        error = RankError(2, 1, "boom", "Traceback\n  line\n")
        error.add_note("no data")
        raise error

    monkeypatch.setattr(devices, "run", fail)
    assert main(["devices"]) == 1
    said = ["Traceback", "  line", "kway: note: no data", "kway: error: rank 2 failed: boom"]
    assert capsys.readouterr().err.splitlines() == said


def test_the_commands_exit_code_is_passed_on(monkeypatch):
    monkeypatch.setattr(devices, "run", lambda args: 7)
    assert main(["devices"]) == 7


def test_other_exceptions_are_not_hidden(monkeypatch):
    def fail(args):
        raise ZeroDivisionError

    monkeypatch.setattr(devices, "run", fail)
    with pytest.raises(ZeroDivisionError):
        main(["devices"])


@pytest.mark.parametrize(("words", "codes"), [(["devices"], [141]), (["--help"], [141, 0])])
def test_a_closed_pipe_is_quiet(words, codes):
    # argparse itself swallows the error where Python's output is unbuffered.
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [sys.executable, "-m", "kway", *words]
    found = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE, check=False, timeout=60)
    os.close(write_end)
    assert found.returncode in codes
    assert found.stderr == b""


@pytest.mark.parametrize(
    "code",
    [
        "import kway.cli.main, kway.devices.topology, kway.devices.select, kway.devices.simulated",
        "from kway.cli.main import main; assert main(['--help']) == 0",
        "from kway.cli.main import main; assert main(['devices']) == 0",
        "from kway.cli.main import main; assert main(['devices', '--json']) == 0",
        "from kway.cli.main import main; assert main(['--version']) == 0",
        "from kway.cli.main import main; assert main(['data', 'list']) == 0",
        "from kway.cli.main import commands, main; assert not any(main([n, '--help']) for n in commands())",
        "from kway.cli.main import main; assert not any(main(['completion', s]) for s in ('bash', 'zsh', 'fish'))",
    ],
)
def test_torch_is_not_imported(code):
    found = python(f"{code}\n{LOADED}")
    assert found.returncode == 0, found.stderr


@pytest.mark.parametrize(
    ("command", "file"),
    [
        ("measure", "measurements.json"),
        ("profile mlp", "workload.json"),
        ("plan mlp", "plan.json"),
        ("tune mlp", "tune.json"),
        ("train mlp", "best.safetensors"),
        ("predict mlp --weights taken", "predictions.safetensors"),
        ("prove mlp", "proof.json"),
    ],
)
def test_a_folder_that_is_taken_is_refused_before_torch_is_imported(tmp_path, command, file):
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / file).touch()
    words = [*command.split(), "--out", "taken"]
    found = python(f"from kway.cli.main import main; assert main({words}) == 2\n{LOADED}", cwd=tmp_path)
    assert found.returncode == 0, found.stderr
    assert f"kway: error: taken already holds {file}" in found.stderr


def test_importing_kway_imports_no_torch():
    found = python(f"import kway\n{LOADED}")
    assert found.returncode == 0, found.stderr


@pytest.mark.parametrize(("words", "bar"), [(["--help"], 12), (["devices"], 30)])
def test_the_start_is_fast(words, bar):
    command = [sys.executable, "-c", f"import sys; from kway.cli.main import main; sys.exit(main({words}))"]
    empty = [sys.executable, "-c", "pass"]
    times = {"command": [], "empty": []}
    for _ in range(7):
        for name, arguments in (("command", command), ("empty", empty)):
            start = time.perf_counter()
            subprocess.run(arguments, check=True, capture_output=True, timeout=60)
            times[name].append(time.perf_counter() - start)
    assert statistics.median(times["command"]) < bar * statistics.median(times["empty"])


def test_a_command_leaves_without_a_look_at_all_objects():
    code = (
        "import sys, gc; sys.argv = ['kway', '--version']; from kway.cli.main import main; main(); "
        "print(gc.get_freeze_count() > 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.splitlines()[-1] == "True"


def test_pressing_once_more_while_it_leaves_adds_nothing():
    code = (
        "import atexit, os, signal, sys\n"
        "from kway.cli import main as command\n"
        "def pressed(words):\n    raise KeyboardInterrupt\n"
        "command._dispatch = pressed\n"
        "atexit.register(lambda: os.kill(os.getpid(), signal.SIGINT))\n"
        "sys.argv = ['kway', 'devices']\n"
        "sys.exit(command.main())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "kway: interrupted\n")


def test_ctrl_c_in_code_that_is_given_as_text_ends_it_the_same_way(tmp_path):
    (tmp_path / "pressed.py").write_text(
        "import signal, sys\n"
        "from kway.cli import main as command\n"
        "command._dispatch = lambda words: exec('signal.raise_signal(signal.SIGINT)', {'signal': signal})\n"
        "sys.exit(command.main())\n"
    )
    # A module: a script ends in another way.
    done = subprocess.run(
        [sys.executable, "-m", "pressed"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (130, "kway: interrupted\n")


@pytest.mark.starts
def test_ctrl_c_while_torch_imports_numpy_ends_it(tmp_path):
    code = (
        "import os, signal, sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'numpy._core.multiarray':\n"
        "            sys.meta_path.remove(self)\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Finder())\n"
        "from kway.cli.main import main\n"
        "sys.argv = ['kway', 'train', 'lenet', '--steps', '1', '--out', 'run']\n"
        "sys.exit(main())\n"
    )
    done = python(code, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (130, "kway: interrupted\n")
    assert not (tmp_path / "run").exists()
