"""Ranks that others started train as those of `kway launch` do; and one that dies ends them all."""

import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from kway.launch.address import reserved_port

LIMIT_S = 100
# A rank that dies is to be noticed within seconds, whatever torch's own time limits are.
ENDED_WITHIN_S = 20

SCRIPT = """
import os, sys, time
from functools import partial
import kway, torch
from torch import nn

way, *rest = sys.argv[1:]
if way == "store":
    import torch.distributed as dist
    rank, size, port = map(int, rest)
    store = dist.TCPStore("127.0.0.1", port, size, rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)

x = torch.randn(101, 8, generator=torch.Generator().manual_seed(0))
y = (x[:, 0] > 0).long()
job = kway.Job(
    model=lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 2)),
    loss=nn.CrossEntropyLoss(), optimizer=partial(torch.optim.Adam, lr=0.01), data=(x, y), batch_size=25,
)
steps = []

def act(event, record):
    steps.append(event)
    if event == "step" and steps.count("step") == 3:
        sys.stderr.write(f"here it ends: {time.monotonic()}\\n")
        os.kill(os.getpid(), 9) if way == "killed" else os._exit(0)

rank = os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("RANK"))
epochs, callbacks = (500, [act] if rank == "0" else []) if way in ("killed", "left") else (2, [])
run = kway.train(job, epochs=epochs, tune=False, callbacks=callbacks, log_every=1)
crowded = [line for line in run.record.notices if "usable core" in line]
sys.stdout.write(f"{run.plan.strategy} {run.record.weights_sha256} {crowded}\\n")
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return str(path)


@pytest.fixture
def mpirun(tmp_path, monkeypatch):
    """The command that starts two ranks by Open MPI, which refuses root and more ranks than cores unless told so."""
    found = shutil.which("mpirun")
    if found is None:
        pytest.skip("there is no mpirun here (Debian: openmpi-bin)")
    version = subprocess.run([found, "--version"], capture_output=True, text=True, check=False).stdout
    if "Open MPI" not in version:
        pytest.skip(f"this mpirun is not Open MPI's: {version.splitlines()[:1]}")
    monkeypatch.setenv("OMPI_ALLOW_RUN_AS_ROOT", "1")
    monkeypatch.setenv("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return [found, "--oversubscribe", "-n", "2", sys.executable]


def output_of(processes):
    """Wait for processes of one job, and return what each printed; all must end well, and in time."""
    deadline = time.monotonic() + LIMIT_S
    found = []
    try:
        for process in processes:
            found.append(process.communicate(timeout=max(1.0, deadline - time.monotonic())))
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * len(processes), found
    return "".join(out for out, _ in found)


def start(command, **variables):
    return subprocess.Popen(
        command,
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def by_hand(script, *words, **variables):
    return [
        start(
            [sys.executable, script, *(word.format(rank=rank) for word in words)],
            **{name: value.format(rank=rank) for name, value in variables.items()},
        )
        for rank in range(2)
    ]


@pytest.fixture
def launched(script, forked_commands, leftovers):
    """What `kway launch` gives, once for each test."""
    command = [sys.executable, "-m", "kway", "launch", "--devices", "cpu:2", script, "plain"]
    lines = [line.partition("] ")[2] for line in output_of([start(command)]).splitlines()]
    assert lines == [lines[0]] * 2
    assert lines[0].startswith("data=2 ")
    return lines


@pytest.mark.starts
def test_ranks_train_alike_whoever_started_them_and_wherever_they_meet(script, launched, tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir()
    numbered = {"RANK": "{rank}", "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    with reserved_port() as port, reserved_port() as other:
        jobs = {
            "tcp": by_hand(script, "plain", **numbered, KWAY_INIT_METHOD=f"tcp://127.0.0.1:{port}"),
            "file": by_hand(script, "plain", **numbered, KWAY_INIT_METHOD=f"file://{shared}/meeting"),
            "store": by_hand(script, "store", "{rank}", "2", str(other), OMP_NUM_THREADS="1"),
        }
        for name, processes in jobs.items():
            assert output_of(processes).splitlines() == launched, name
    assert list(shared.iterdir()) == []


@pytest.mark.starts
def test_ranks_of_mpirun_train_as_those_of_kway_launch(script, launched, mpirun, tmp_path):
    assert output_of([start([*mpirun, script, "plain"])]).splitlines() == launched
    assert [*tmp_path.glob("kway-*")] == []


def seconds_since_the_end(said):
    return time.monotonic() - float(said.partition("here it ends: ")[2].split()[0])


@pytest.mark.starts
def test_a_rank_that_is_killed_under_mpirun_takes_the_others_along(script, mpirun, leftovers, tmp_path):
    done = subprocess.run(
        [*mpirun, script, "killed"], capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 128 + signal.SIGKILL, done.stderr
    assert seconds_since_the_end(done.stderr) < ENDED_WITHIN_S
    assert done.stdout == ""
    deadline = time.monotonic() + 5
    while (left := leftovers()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left
    assert not [*tmp_path.glob("*.meet")]


@pytest.mark.starts
@pytest.mark.usefixtures("forked_commands")
def test_a_rank_that_leaves_too_early_is_missed_by_the_others(script, tmp_path, leftovers):
    """With exit code 0, of which no launcher thinks anything: the others end with another."""
    meeting = {"RANK": "{rank}", "WORLD_SIZE": "2", "KWAY_INIT_METHOD": f"file://{tmp_path}/meeting"}
    first, second = by_hand(script, "left", **meeting)
    try:
        _, said = first.communicate(timeout=LIMIT_S)
        out, errors = second.communicate(timeout=LIMIT_S)
    finally:
        first.kill()
        second.kill()
    assert (first.returncode, second.returncode, out) == (0, 1, ""), errors
    assert seconds_since_the_end(said) < ENDED_WITHIN_S
    assert "gloo" in errors


@pytest.mark.starts
def test_a_place_to_meet_that_cannot_be_is_one_error_before_anything_starts(script, tmp_path, capsys):
    from kway.cli.main import main

    logs = tmp_path / "logs"
    for url, words in (("tcp://node-0", "a host and a port"), (f"file://{tmp_path}", "is a folder")):
        words_of = [
            "launch",
            "--devices",
            "cpu:2",
            "--logs",
            str(logs),
            "--init-method",
            url,
            script,
            "plain",
        ]
        assert main(words_of) == 2
        out, err = capsys.readouterr()
        assert (out, len(err.splitlines())) == ("", 1)
        assert words in err
    assert not logs.exists()
