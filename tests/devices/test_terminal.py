"""Where a line is redrawn in place: asked by all that show how far something is."""

import io
import sys

import pytest
import torch
from torch import nn

import kway
from kway.cli.main import main
from kway.data import fetching
from kway.devices.terminal import redraws


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "environ", "expected"),
    [
        (Terminal(), {}, True),
        (Terminal(), {"CI": "false", "TERM": "xterm", "NO_COLOR": "1"}, True),
        (Terminal(), {"CI": "true"}, False),
        (Terminal(), {"TERM": "dumb"}, False),
        (io.StringIO(), {}, False),
    ],
)
def test_a_line_is_redrawn_on_terminals_only(stream, environ, expected):
    assert redraws(stream, environ) is expected


def terminal(monkeypatch, ci):
    """Let standard output, until the test ends, be a terminal, of CI where ``ci`` is not empty."""
    monkeypatch.setenv("CI", ci)
    monkeypatch.setenv("TERM", "xterm")
    out = Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    return out


@pytest.mark.parametrize("ci", ["", "true"])
def test_a_download_is_redrawn_on_terminals_only(ci, monkeypatch, tmp_path):
    def fetch(name, root, tell):
        for done in (0, 50):
            tell({"event": "bytes", "file": "a.gz", "done": done, "of": 100})
        raise kway.DataError("no more", "the rest", "try again")

    monkeypatch.setattr(fetching, "fetch", fetch)
    out = terminal(monkeypatch, ci)
    assert main(["data", "fetch", "mnist", "--data-dir", str(tmp_path)]) != 0
    assert "a.gz" in out.getvalue()
    assert ("\r" in out.getvalue()) is (not ci)


@pytest.mark.parametrize("ci", ["", "true"])
def test_progress_of_a_run_is_redrawn_on_terminals_only(ci, monkeypatch):
    data = torch.randn(8, 3), torch.arange(8) % 2
    job = kway.Job(nn.Linear(3, 2), nn.CrossEntropyLoss(), torch.optim.SGD, data, batch_size=2)
    out = terminal(monkeypatch, ci)
    kway.train(job, devices="cpu:1", epochs=1, progress=True, log_every=1, tune=False)
    assert "epoch 1/1" in out.getvalue()
    assert ("\r" in out.getvalue()) is (not ci)
