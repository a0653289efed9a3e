"""``kway train`` and ``kway launch`` where memory runs out: one error, exit code 1, nothing left; and ``--on-oom``."""

import json
import subprocess
import sys

import pytest

from kway.cli.main import main

FILE = """
import torch
from torch import nn

X = torch.linspace(-1, 1, 12).unsqueeze(1)


class Line(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def forward(self, x):
        if len(x) > 2 and self.training:
            torch.empty(2**62, dtype=torch.uint8)
        return self.layer(x)


def data():
    return X, 2 * X
"""
SCRIPT = """
import kway
import torch
from line import Line, data
from torch import nn

job = kway.Job(
    model=Line, loss=nn.MSELoss(), optimizer=lambda p: torch.optim.SGD(p, lr=0.1), data=data(), batch_size=6
)
with kway.parallel(job) as p:
    for batch in p.batches(0):
        p.step(batch)
"""
TRAIN = ["train", "line.py:Line", "--data", "line.py:data", "--batch-size", "6", "--epochs", "1"]
TRAIN += ["--step-kind", "eager", "--out", "run"]
pytestmark = pytest.mark.usefixtures("forks")


@pytest.fixture
def here(tmp_path, monkeypatch):
    (tmp_path / "line.py").write_text(FILE)
    (tmp_path / "script.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("devices", ["cpu:1", "cpu:2"])
def test_one_error_and_nothing_left(here, capsys, leftovers, devices):
    assert main([*TRAIN, "--devices", devices]) == 1
    said = capsys.readouterr().err
    assert said.count("ran out of memory") == 1
    assert said.count("kway: error:") == 1
    assert "4096.0 PiB were asked for" in said
    assert "Traceback" not in said
    assert not (here / "run" / "train.json").exists()


@pytest.mark.parametrize("devices", ["cpu:1", "cpu:2"])
def test_adapt_goes_on_with_fewer_samples_at_once(here, capsys, leftovers, devices):
    assert main([*TRAIN, "--devices", devices, "--on-oom", "adapt"]) == 0
    said = capsys.readouterr()
    record = json.loads((here / "run" / "train.json").read_text())
    assert record["job"]["micro_batch"] == 1
    assert record["batch_size"] == 6
    assert "from now on micro_batch=1" in said.out + said.err
    # Each start says how many samples it computes at once; what stays the same is said once.
    lines = said.out.splitlines()
    sizes = [3, 1] if devices == "cpu:1" else [1]
    batches = [line for line in lines if line.startswith("batch ")]
    assert batches[0] == "batch      6 (global), fp32, seed 0"
    assert batches[1:] == [f"batch      6 (global), micro-batch {size}, fp32, seed 0" for size in sizes]
    assert sum(line.startswith("devices ") for line in lines) == 1
    # Why memory ran out is told in full once when it happens; at the end stands only how the run went in the end.
    warned = [line for line in lines if line.startswith("warning") and "from now on" in line]
    assert ["at once of a global batch" in line for line in warned] == [True, False][: len(sizes)]
    noted = [line for line in lines if line.startswith("note") and "from now on" in line]
    assert [f"micro_batch={sizes[-1]}" in line for line in noted] == [True]
    assert main([*TRAIN[:-1], "own", "--devices", devices, "--micro-batch", "1"]) == 0
    assert "batch      6 (global), micro-batch 1, fp32, seed 0" in capsys.readouterr().out
    own = json.loads((here / "own" / "train.json").read_text())
    assert record["weights_sha256"] == own["weights_sha256"]


def test_bits_are_not_adapted(here, capsys):
    assert main([*TRAIN, "--devices", "cpu:1", "--exactness", "bits", "--on-oom", "adapt"]) == 2
    said = capsys.readouterr().err
    assert "on_oom='adapt' (--on-oom adapt) at exactness bits" in said
    assert "--shards" in said
    assert not (here / "run").exists()


@pytest.mark.usefixtures("forked_commands")
def test_a_script_shows_the_table_once(here, leftovers):
    command = [sys.executable, "-m", "kway", "launch", "--devices", "cpu:2", "script.py"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert run.returncode == 1
    assert run.stderr.count("what helps:") == 1
    assert run.stderr.count("kway: error: rank") == 1
    assert "line.py" in run.stderr
