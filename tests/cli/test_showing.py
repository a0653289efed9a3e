"""What ``kway train`` shows while it runs: on a terminal, in a log, in the log of CI, and with --quiet."""

import io
import os
import pty
import subprocess
import sys
from argparse import Namespace

import pytest

from kway.cli.main import main
from kway.cli.train import _Shown

WORDS = "train mlp --data synthetic --devices cpu:1 --batch-size 500 --epochs 3 --lr 0.1 --log-every 1"


def on_a_terminal(tmp_path, environ):
    """Return what a terminal gets of a run, as text."""
    ours, theirs = pty.openpty()
    done = subprocess.Popen(
        [sys.executable, "-m", "kway", *WORDS.split(), "--out", str(tmp_path / "run")],
        stdin=theirs, stdout=theirs, stderr=theirs, env={**os.environ, "CI": "", **environ},
    )  # fmt: skip
    os.close(theirs)
    said = b""
    try:
        while part := os.read(ours, 1 << 16):
            said += part
    except OSError:  # the other end is closed
        pass
    os.close(ours)
    assert done.wait(60) == 0
    return said.decode().replace("\r\n", "\n")


@pytest.mark.usefixtures("forked_commands")
@pytest.mark.parametrize(
    ("environ", "redraws"), [({"NO_COLOR": "1", "TERM": "xterm-256color"}, True), ({"CI": "1"}, False)]
)
def test_a_terminal_gets_one_line_in_place_and_no_escape_sequences(tmp_path, environ, redraws):
    said = on_a_terminal(tmp_path, environ)
    assert "\x1b" not in said
    assert ("\r" in said) is redraws
    assert sum(line.rpartition("\r")[2].startswith("epoch ") for line in said.split("\n")) == 3


def test_quiet_shows_warnings_and_errors_only(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main([*WORDS.split(), "--out", "run", "--quiet"]) == 0
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", "")
    assert (tmp_path / "run/train.json").exists()
    assert main([*WORDS.split(), "--out", "run", "--quiet"]) == 2
    assert "already holds" in capsys.readouterr().err


def test_quiet_still_warns(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wandb.py").write_text("def init(**options):\n    raise OSError('no network')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        assert main([*WORDS.split(), "--out", "run", "--quiet", "--tracker", "wandb"]) == 0
    finally:
        sys.modules.pop("wandb", None)
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith(
        "kway: warning: tracker wandb failed in begin, and hears no more of this run: OSError"
    )


def test_quiet_leaves_the_record_that_was_asked_for(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main([*WORDS.split(), "--out", "run", "--quiet", "--json"]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("{")
    assert said.err == ""


@pytest.mark.parametrize("batch", ["6 (global), fp32, seed 0", "3 a device, fp32, seed 0"])
def test_another_start_shows_its_batch_where_that_is_another(batch):
    screen = io.StringIO()
    args = Namespace(step_kind="auto", exactness="math")
    shown = _Shown(args, ["model      mlp", f"batch      {batch}"], screen, lambda event: None)
    job = dict.fromkeys(("held_out", "samples", "loss", "penalty", "schedule", "optimizer"))
    job |= {"data": "x", "batch_size": 6, "precision": "fp32", "seed": 0}
    for micro, devices in [(None, 2), (None, 2), (1, 2), (1, 1)]:
        shown("start", {"devices": devices, "strategy": "data", "job": {**job, "micro_batch": micro}})
    assert screen.getvalue().splitlines()[2:] == [
        "devices    2 (data, math)",
        "batch      6 (global), micro-batch 1, fp32, seed 0",
        "devices    1 (data, math)",
    ]
