"""`kway train` is told to stop, or loses a rank: what is left can be gone on with, to the same bits.

One of these runs is started as a user starts it. The others are processes, too, but forked.
"""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from tests.commands import forking_commands

pytestmark = [pytest.mark.starts, pytest.mark.usefixtures("leftovers", "forked_commands")]
STARTED = subprocess.Popen  # what the fixture leaves as it is

NET = """
import os, pathlib, signal, time
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(784, 16), nn.Dropout(0.2), nn.Linear(16, 10))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        if self.training:
            pathlib.Path("in-step-" + os.environ.get("RANK", "0")).touch()
            time.sleep(float(os.environ.get("STEP_S", "0")))
            self.steps += 1
            once = pathlib.Path(os.environ.get("KILL_ONCE", "/nowhere"))
            if int(self.steps) == 9 and os.environ.get("RANK") == os.environ.get("KILL_RANK") and once.exists():
                once.unlink()
                os.kill(os.getpid(), signal.SIGKILL)
        return self.body(x)
"""
STEPS = 14


def command(*more):
    fixed = "--data synthetic --batch-size 64 --exactness bits --shards 4 --checkpoint-every 4steps"
    return [
        *(sys.executable, "-m", "kway", "train", "net.py:Net", *fixed.split()),
        *("--steps", str(STEPS), "--log-every", "1", "--out", "run", *more),
    ]


def finished(folder, *more, **options):
    """Run to the end in ``folder``, which holds the model; return how it ended."""
    return subprocess.run(
        command(*more), cwd=folder, check=False, capture_output=True, text=True, timeout=90, **options
    )


def record(folder):
    return json.loads((folder / "run" / "train.json").read_text())


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "net.py").write_text(NET)
    return tmp_path


@pytest.fixture(scope="module")
def expected(tmp_path_factory, zygotes):
    """The fingerprint of the run that nobody stops."""
    own = tmp_path_factory.mktemp("whole")
    (own / "net.py").write_text(NET)
    with forking_commands(zygotes):
        done = finished(own, "--devices", "cpu:1")
    assert done.returncode == 0, done.stderr
    return record(own)["weights_sha256"]


def started(folder, devices, start=None, **environment):
    return (start or subprocess.Popen)(
        command("--devices", devices),
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "STEP_S": "0.1", **environment},
    )


def until_a_checkpoint(folder, process, step=4):
    deadline = time.monotonic() + 60
    while not (folder / "run" / "checkpoints" / f"step-{step}").exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.timeout(150)
@pytest.mark.parametrize(
    ("devices", "start", "number", "then"),
    [("cpu:2", None, signal.SIGTERM, "cpu:1"), ("cpu:1", STARTED, signal.SIGUSR1, "cpu:3")],
    ids=["two", "one"],
)
def test_a_run_that_is_told_to_stop_leaves_a_checkpoint_and_is_gone_on_with(
    folder, expected, devices, start, number, then
):
    process = started(folder, devices, start)
    until_a_checkpoint(folder, process)
    process.send_signal(number)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 75, errors
    assert f"stopped by {number.name} after step" in errors
    last = max((folder / "run" / "checkpoints").iterdir(), key=lambda path: int(path.name.split("-")[1]))
    assert f"{last.name} is complete; go on with --resume --out run" in errors
    assert not (folder / "run" / "train.json").exists()
    done = finished(folder, "--devices", then, "--resume")
    assert done.returncode == 0, done.stderr
    assert record(folder)["resumed_from_step"] == int(last.name.split("-")[1])
    assert record(folder)["weights_sha256"] == expected


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("devices", "count"), [("cpu:1", 1), ("cpu:2", 2)])
def test_a_second_signal_ends_the_run_at_once(folder, devices, count):
    process = started(folder, devices, STEP_S="30")
    deadline = time.monotonic() + 40
    while len(list(folder.glob("in-step-*"))) < count:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    time.sleep(0.8)  # sooner, it would count as the same order
    process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    process.communicate(timeout=20)
    assert process.returncode == 128 + signal.SIGTERM
    assert time.monotonic() - began < 10


@pytest.mark.timeout(60)
@pytest.mark.parametrize("devices", ["cpu:1", "cpu:2"])
def test_an_order_that_is_repeated_when_it_was_obeyed_changes_nothing(folder, devices):
    process = started(folder, devices)
    until_a_checkpoint(folder, process)
    before = set((folder / "run" / "checkpoints").glob("step-*"))
    ordered = time.monotonic()
    process.send_signal(signal.SIGTERM)
    while not set((folder / "run" / "checkpoints").glob("step-*")) - before:
        time.sleep(0.005)
    while process.poll() is None:
        # Sooner it would count as the same order, or as one that nobody knows yet to be obeyed.
        if time.monotonic() - ordered > 2:
            process.send_signal(signal.SIGTERM)
        time.sleep(0.02)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 75, errors


def faulty(folder, rank):
    """The environment in which a rank is killed once, in its ninth step."""
    (folder / "once").touch()
    return {**os.environ, "KILL_ONCE": str(folder / "once"), "KILL_RANK": str(rank)}


@pytest.mark.timeout(150)
def test_a_rank_that_dies_is_gone_on_without(folder, expected):
    done = finished(folder, "--devices", "cpu:3", "--max-restarts", "1", env=faulty(folder, 1))
    assert done.returncode == 0, done.stderr
    found = record(folder)
    assert any("restarted on 2 devices" in line and "rank 1" in line for line in found["notices"])
    assert found["devices"] == 2
    assert found["resumed_from_step"] in (4, 8)
    assert found["weights_sha256"] == expected
    # Another start shows what is new of it alone.
    said = [line for line in done.stdout.splitlines() if line.startswith(("batch ", "devices "))]
    assert [line.split(None, 2)[:2] for line in said] == [["batch", "64"], ["devices", "3"], ["devices", "2"]]


@pytest.mark.timeout(90)
def test_without_restarts_a_death_ends_the_run_with_the_ranks_own_exit_code(folder):
    done = finished(folder, "--devices", "cpu:2", env=faulty(folder, 0))
    assert done.returncode == 128 + signal.SIGKILL
    assert "rank 0 failed" in done.stderr.splitlines()[-1]
    assert (folder / "run" / "checkpoints" / "step-4").exists()
