import signal
import subprocess
import sys

import pytest

from kway.cli.main import main
from kway.launch.address import reserved_port

pytestmark = pytest.mark.starts


def kway(*words):
    return subprocess.run(
        [sys.executable, "-m", "kway", "launch", *words], capture_output=True, text=True, check=False
    )


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(
        "import os, sys\n"
        "print(sys.argv[1:], os.environ.get('RANK'), os.environ.get('OMP_NUM_THREADS') is not None)\n"
        "if os.environ.get('RANK', '1') == '1':\n"
        "    sys.exit(int(sys.argv[1]))\n"
    )
    return str(path)


def test_flags_after_the_script_are_the_scripts(script, leftovers):
    done = kway("--devices", "cpu:2", script, "0", "--devices", "3", "--help")
    assert done.returncode == 0, done.stderr
    arguments = ["0", "--devices", "3", "--help"]
    assert sorted(done.stdout.splitlines()) == [f"[rank {rank}] {arguments} {rank} True" for rank in (0, 1)]


@pytest.mark.parametrize("flag", ["--local-rank", "--local_rank"])
@pytest.mark.usefixtures("forked_commands")
def test_scripts_that_declare_it_get_their_local_rank_when_asked_for(tmp_path, flag, leftovers):
    path = tmp_path / "declares.py"
    path.write_text(
        "import argparse\nparser = argparse.ArgumentParser()\n"
        f"parser.add_argument({flag!r}, type=int, required=True)\nparser.add_argument('--lr')\n"
        "args = parser.parse_args()\nprint(args.local_rank, args.lr)\n"
    )
    done = kway("--devices", "cpu:2", flag, str(path), "--lr", "1")
    assert sorted(done.stdout.splitlines()) == ["[rank 0] 0 1", "[rank 1] 1 1"], done.stderr
    assert kway("--devices", "cpu:1", flag, str(path)).stdout == "0 None\n"
    done = kway("--devices", "cpu:2", flag, str(path), "--local_rank=1")
    assert (done.returncode, done.stdout) == (2, "")
    assert f"{flag}, and --local_rank=1 after {path}: each rank is to hear its own number" in done.stderr


@pytest.mark.parametrize("way", ["flag", "variable"])
@pytest.mark.usefixtures("forked_commands")
def test_ranks_are_told_where_to_meet(tmp_path, way, monkeypatch, leftovers):
    path = tmp_path / "tells.py"
    names = ("KWAY_INIT_METHOD", "MASTER_ADDR", "MASTER_PORT")
    path.write_text(f"import os\nprint(*map(os.environ.get, {names}))\n")
    with reserved_port() as port:
        pass
    url = f"tcp://localhost:{port}"
    if way == "variable":
        monkeypatch.setenv("KWAY_INIT_METHOD", url)
    done = kway("--devices", "cpu:2", *(["--init-method", url] if way == "flag" else []), str(path))
    assert sorted(done.stdout.splitlines()) == [f"[rank {r}] {url} localhost {port}" for r in (0, 1)], (
        done.stderr
    )


def test_the_exit_code_of_the_rank_that_failed_is_that_of_the_command(script, leftovers):
    done = kway("--devices", "cpu:2", script, "42")
    assert done.returncode == 42
    assert done.stderr.splitlines()[-1] == "kway: error: rank 1 failed: left with exit code 42"


def test_a_traceback_is_shown_once_and_its_cause_last(tmp_path, leftovers):
    path = tmp_path / "boom.py"
    path.write_text("import os\nif os.environ['RANK'] == '1':\n    raise ValueError('boom\\nand more')\n")
    done = kway("--devices", "cpu:2", str(path))
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-2:] == ["and more", "kway: error: rank 1 failed: ValueError: boom"]
    assert done.stderr.count("Traceback") == lines.count("and more") == 1


def test_one_device_runs_the_script_as_it_is(script, leftovers):
    done = kway("--devices", "cpu:1", script, "7")
    assert (done.returncode, done.stderr) == (7, "")
    assert done.stdout.startswith("['7'] None")


@pytest.mark.parametrize(("name", "code"), [("RefusedError", 2), ("StoppedError", 75), ("KwayError", 1)])
def test_an_error_of_kway_s_ends_a_script_alike_on_any_number_of_devices(tmp_path, name, code, leftovers):
    path = tmp_path / "own.py"
    path.write_text(f"import kway\ndef ask():\n    raise kway.{name}('it', 'is refused')\nask()\n")
    shown = [
        "Traceback (most recent call last):",
        f'  File "{path}", line 4, in <module>',
        "    ask()",
        f'  File "{path}", line 3, in ask',
        f"    raise kway.{name}('it', 'is refused')",
        f"kway.errors.{name}: it: is refused",
        "kway: error: it: is refused",
    ]
    for flags in (["--devices", "cpu:1"], ["--devices", "cpu:2"]):
        done = kway(*flags, str(path))
        assert (done.returncode, done.stderr.splitlines()) == (code, shown)


@pytest.mark.parametrize("module", [False, True])
def test_one_device_gives_a_script_all_that_python_would(tmp_path, module, leftovers):
    """Its traceback without a line of kway's, its input, its main module, and its end by a signal."""
    path = tmp_path / "own.py"
    path.write_text(
        "import multiprocessing, os, pickle, sys\n"
        "class Point: pass\n"
        "def say(): print(type(pickle.loads(pickle.dumps(Point()))).__name__, sys.argv[1:], flush=True)\n"
        "if __name__ == '__main__':\n"
        "    process = multiprocessing.get_context('spawn').Process(target=say)\n"
        "    process.start()\n"
        "    process.join()\n"
        "    say()\n"
        "    print(sys.stdin.read(), sys.path[0] == os.getcwd(), flush=True)\n"
        "    raise {'own': ValueError, 'stop': KeyboardInterrupt}[sys.argv[1]](sys.argv[1])\n"
    )
    target = ["-m", "own"] if module else [str(path)]
    for word, kind, code in (("own", "ValueError", 1), ("stop", "KeyboardInterrupt", -signal.SIGINT)):
        done = subprocess.run(
            [sys.executable, "-m", "kway", "launch", "--devices", "cpu:1", *target, word],
            input="typed",
            capture_output=True,
            text=True,
            check=False,
            cwd=tmp_path,
        )
        assert done.returncode == code, done.stderr
        assert done.stdout.splitlines() == [f"Point ['{word}']", f"Point ['{word}']", "typed True"]
        first, where, _, last = done.stderr.splitlines()
        assert first == "Traceback (most recent call last):"
        assert where.strip() == f'File "{path}", line 10, in <module>'
        assert last.startswith(kind)


def test_a_flag_of_kway_s_after_the_script_is_handed_on_with_a_warning(script, monkeypatch, capsys):
    given = []

    def launched(target, words, devices, **_):
        given.append(words)
        return []

    monkeypatch.setattr("kway.launch.script.launch", launched)
    for before in (["--devices", "cpu:2"], ["--devices", "cpu:2", "--stall-timeout", "9s"]):
        assert main(["launch", *before, script, "--devices", "3", "--stall-timeout=2s", "--epochs", "3"]) == 0
        said = capsys.readouterr().err.splitlines()
        told = (
            f"kway: warning: --stall-timeout after {script} is the script's own: kway's flags come before it"
        )
        assert [line for line in said if "script's own" in line] == [told] * (len(before) == 2)
    assert given == [["--devices", "3", "--stall-timeout=2s", "--epochs", "3"]] * 2


def test_logs_hold_what_ranks_print(script, tmp_path, leftovers):
    assert kway("--devices", "cpu:2", "--logs", str(tmp_path / "a" / "logs"), script, "0").returncode == 0
    assert (tmp_path / "a" / "logs" / "rank-1.log").read_text() == "['0'] 1 True\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "SCRIPT is missing"),
        (["--devices", "cpu:2", "missing.py"], "no file missing.py"),
        (["--devices", "cpu:0", "SCRIPT"], "cpu:0"),
        (
            ["cpu:2", "own.py"],
            "no script cpu:2: devices are named by a flag; kway launch --devices cpu:2 own.py",
        ),
        (["2", "-m", "tool", "a b"], "kway launch --devices 2 -m tool 'a b'"),
        (["--devices", "cpu:2", "--logs", "/proc/nowhere", "SCRIPT"], "/proc/nowhere"),
    ],
)
def test_bad_input_is_refused_before_anything_starts(words, message, script, capsys, leftovers):
    assert main(["launch", *[script if word == "SCRIPT" else word for word in words]]) == 2
    assert message in capsys.readouterr().err
    assert leftovers() == {}


def test_inside_ranks_that_are_there_nothing_is_launched(script, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["launch", script, "0"]) == 2
    assert "this is rank 1 of 2 already (RANK, WORLD_SIZE)" in capsys.readouterr().err
