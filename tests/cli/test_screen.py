"""Output that cannot be shown, and signals that end a command: one line each, and no traceback."""

import errno
import io
import os
import signal
import subprocess
import sys

import pytest

from kway.cli import _screen
from kway.cli.main import main

KWAY = [sys.executable, "-m", "kway"]
FULL = "kway: warning: standard output cannot be written: No space left on device; nothing more is shown\n"


class Failing(io.StringIO):
    def __init__(self, error):
        super().__init__()
        self.error, self.tries = error, 0

    def flush(self):
        self.tries += 1
        raise self.error


def test_what_cannot_be_written_is_lost_with_one_warning():
    warned = []
    stream = Failing(OSError(errno.ENOSPC, "No space left on device"))
    screen = _screen.Screen(stream, warned.append)
    assert not screen.isatty()
    for _ in range(3):
        print("line", file=screen, flush=True)
    assert warned == ["No space left on device"]
    assert stream.tries == 1
    assert screen.lost


def test_a_reader_that_went_away_is_told():
    screen = _screen.Screen(Failing(BrokenPipeError()), pytest.fail)
    with pytest.raises(BrokenPipeError):
        screen.flush()


def test_streams_are_put_back(capsys):
    before = sys.stdout, sys.stderr
    with _screen.screens():
        print("shown")
        print("said", file=sys.stderr)
    assert (sys.stdout, sys.stderr) == before
    assert capsys.readouterr() == ("shown\n", "said\n")


def test_streams_that_are_not_there_take_everything(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["--version"]) == 0
    assert sys.stdout is None


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")  # noqa: PTH110
@pytest.mark.parametrize("line", [["--version"], ["devices", "--json"]])
def test_an_answer_that_cannot_be_printed_is_a_failure(line):
    with open("/dev/full", "w") as full:  # noqa: PTH123
        done = subprocess.run(
            [*KWAY, *line], stdout=full, stderr=subprocess.PIPE, text=True, check=False, timeout=60
        )
    assert (done.returncode, done.stderr) == (1, FULL)


FILE = """
import torch
from torch import nn

X = torch.linspace(-1, 1, 12).unsqueeze(1)


class Line(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def forward(self, x):
        return self.layer(x)


def data():
    return X, 2 * X
"""
TRAIN = ["train", "line.py:Line", "--data", "line.py:data", "--devices", "cpu:1", "--batch-size", "6"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    (tmp_path / "line.py").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("number", [1, 2])
def test_a_run_goes_on_without_its_output(here, monkeypatch, capfd, number):
    stream = Failing(OSError(errno.ENOSPC, "No space left on device"))
    monkeypatch.setattr(sys, {1: "stdout", 2: "stderr"}[number], stream)
    assert main([*TRAIN, "--epochs", "2", "--out", "run"]) == 0
    assert (here / "run" / "train.json").exists()
    assert (capfd.readouterr().err == FULL) == (number == 1)


@pytest.mark.starts
def test_a_run_goes_on_with_closed_streams(here):
    line = " ".join([*KWAY, *TRAIN, "--epochs", "1", "--out", "run"])
    assert subprocess.run(f"{line} <&- >&- 2>&-", shell=True, check=False, timeout=60).returncode == 0
    assert (here / "run" / "train.json").exists()


SIGNALLED = (
    FILE
    + """
import os, pathlib, signal


class Signalled(Line):
    def forward(self, x):
        if self.training and pathlib.Path("run", *pathlib.Path("when").read_text().split()).exists():
            os.kill(os.getpid(), int(pathlib.Path("number").read_text()))
        return super().forward(x)
"""
)


def signalled(here, number, when, *more):
    (here / "line.py").write_text(SIGNALLED)
    (here / "number").write_text(str(int(number)))
    (here / "when").write_text(when)
    return main([TRAIN[0], "line.py:Signalled", *TRAIN[2:], "--epochs", "50", "--out", "run", *more])


@pytest.mark.parametrize(
    ("number", "code", "said"),
    [(signal.SIGINT, 130, "interrupted"), (signal.SIGHUP, 129, "ended by SIGHUP")],
)
def test_a_signal_that_ends_a_run_is_told_and_leaves_no_empty_folder(here, capsys, number, code, said):
    assert signalled(here, number, "") == code
    nothing = "nothing to go on from was saved; --checkpoint-every (checkpoint_every=) saves on the way"
    assert capsys.readouterr().err == f"kway: {said}: {nothing}\n"
    assert not (here / "run").exists()
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_DFL


def test_ctrl_c_says_what_is_there_to_go_on_with(here, capsys):
    assert signalled(here, signal.SIGINT, "checkpoints step-2", "--checkpoint-every", "2steps") == 130
    said = capsys.readouterr().err
    assert said.startswith("kway: interrupted: run/checkpoints/step-")
    assert "is complete; go on with --resume --out run (in Python: resume=True, out='run')" in said
    # A checkpoint is whole when it is named.
    step = said.partition("step-")[2].partition(" ")[0]
    assert (here / "run" / "checkpoints" / f"step-{step}" / "manifest.json").exists()
