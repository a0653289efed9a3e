"""What happens when a rank does not finish: the cause is named, the exit code kept, and nothing survives."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from kway.errors import KwayError, NonFiniteError, RankError
from kway.launch.local import Ranks, run

pytestmark = [pytest.mark.starts, pytest.mark.usefixtures("leftovers")]


def fails(task, ranks=2, **options):
    """Run a task that fails; return the error and how many seconds it took from the first start."""
    began = time.monotonic()
    with pytest.raises(KwayError) as caught:
        run(task, ["cpu"] * ranks, group=options.pop("group", False), echo=False, **options)
    return caught.value, time.monotonic() - began


def gone(leftovers):
    """Whether all processes of the test are gone: a killed one may take a moment to vanish."""
    deadline = time.monotonic() + 2
    while leftovers() and time.monotonic() < deadline:
        time.sleep(0.01)
    return not leftovers()


def wait_forever():
    while True:
        time.sleep(60)


def test_an_exception_is_reported_with_its_rank_and_line():
    def task(context):
        if context.world.rank == 1:
            raise ValueError("boom")
        wait_forever()

    error, seconds = fails(task)
    assert isinstance(error, RankError)
    assert (error.rank, error.exit_code) == (1, 1)
    assert str(error).splitlines()[-1] == "rank 1 failed: ValueError: boom"
    assert 'raise ValueError("boom")' in error.traceback
    assert "worker.py" not in error.traceback
    assert seconds < 10


@pytest.mark.parametrize(
    ("leave", "code", "words"),
    [
        (lambda: sys.exit(42), 42, "exit code 42"),
        (lambda: os._exit(3), 3, "exit code 3"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), 137, "SIGKILL"),
        (lambda: os.kill(os.getpid(), signal.SIGSEGV), 139, "SIGSEGV"),
        (lambda: os._exit(0), 1, "ended early"),
        (lambda: sys.exit(0), 1, "ended early"),
    ],
    ids=["exit42", "_exit3", "kill", "segv", "_exit0", "exit0"],
)
def test_exit_codes_are_kept(leave, code, words):
    def task(context):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if context.world.rank == 1:
            leave()
        wait_forever()

    error, seconds = fails(task)
    assert (error.rank, error.exit_code) == (1, code)
    assert words in str(error)
    assert seconds < 10


def test_out_of_memory_is_an_error_like_any_other():
    def task(context):
        if context.world.rank == 0:
            raise MemoryError
        wait_forever()

    assert str(fails(task)[0]).endswith("rank 0 failed: MemoryError")


def test_an_error_of_kway_comes_through_as_itself():
    def task(context):
        if context.world.rank == 1:
            raise NonFiniteError("the loss is nan", "epoch 0, step 3, rank 1")
        wait_forever()

    error, _ = fails(task)
    assert type(error) is NonFiniteError
    assert str(error) == "the loss is nan: epoch 0, step 3, rank 1"


@pytest.mark.usefixtures("forks")
def test_peers_in_a_collective_are_not_waited_for_nor_blamed():
    def task(context):
        if context.world.rank == 1:
            time.sleep(0.2)
            raise ValueError("boom")
        dist.all_reduce(torch.ones(4))

    error, seconds = fails(task, group=True, ranks=2, threads=1)
    assert str(error).endswith("rank 1 failed: ValueError: boom")
    assert seconds < 20


@pytest.mark.usefixtures("forks")
def test_a_killed_rank_is_the_cause_not_the_peer_that_lost_it():
    def task(context):
        dist.barrier()
        if context.world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(4))

    error, _ = fails(task, group=True, ranks=2, threads=1)
    assert (error.rank, error.exit_code) == (1, 137)


def test_a_rank_that_left_is_the_cause_though_a_peer_that_lost_it_is_heard_first():
    def task(context):
        if context.world.rank == 1:
            time.sleep(1.3)
            os._exit(0)
        if context.world.rank == 2:
            raise RuntimeError("Connection closed by peer")
        time.sleep(600)

    error, seconds = fails(task, ranks=3)
    assert (
        str(error) == "rank 1 failed: ended early: its process left with exit code 0 before its work was done"
    )
    assert seconds < 10


@pytest.mark.usefixtures("forks")
def test_a_rank_that_aborts_gives_its_reason_in_the_last_line():
    def task(context):
        dist.all_reduce(torch.ones(4 if context.world.rank else 2, 2))

    error, _ = fails(task, group=True, ranks=2, threads=1)
    assert error.exit_code == 128 + signal.SIGABRT
    assert error.headline.endswith("Is there a distributed collective mismatch in your code?")
    assert not error.died


def test_what_a_rank_started_goes_with_it(leftovers):
    def task(context):
        subprocess.Popen(["sleep", "600"])
        if context.world.rank == 1:
            raise ValueError("boom")
        wait_forever()

    fails(task)
    assert gone(leftovers)


def test_what_a_finished_rank_started_goes_too(leftovers):
    def task(context):
        subprocess.Popen(["sleep", "600"])

    run(task, ["cpu"], group=False)
    assert gone(leftovers)


def test_after_a_failure_the_ranks_are_gone_and_so_are_their_files(tmp_path, monkeypatch, leftovers):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def task(context):
        raise ValueError("boom")

    ranks = Ranks(["cpu"] * 2, group=False, echo=False)
    with pytest.raises(RankError):
        ranks.run(task)
    assert not ranks.alive
    assert gone(leftovers)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(KwayError, match="gone"):
        ranks.run(task)


def test_an_error_in_the_callers_own_callback_ends_the_ranks(leftovers):
    def task(context):
        context.emit("hello")
        wait_forever()

    def on_event(event):
        raise LookupError(event)

    with pytest.raises(LookupError, match="hello"):
        run(task, ["cpu"] * 2, group=False, echo=False, on_event=on_event)
    assert gone(leftovers)


def test_the_first_failure_of_many_is_found_under_their_output(tmp_path, capfd):
    def task(context):
        rank = context.world.rank
        for line in range(200):
            print(f"{rank}:{line}:" + "x" * 200)
        if rank == 5:
            raise RuntimeError("the first")
        time.sleep(0.5)
        raise ValueError("a later one")

    with pytest.raises(RankError) as caught:
        run(task, ["cpu"] * 8, group=False, logs=tmp_path)
    assert str(caught.value).endswith("rank 5 failed: RuntimeError: the first")
    lines = capfd.readouterr().out.splitlines()
    assert all(re.fullmatch(r"\[rank (\d)\] \1:\d+:x{200}", line) for line in lines)
    assert sum(line.startswith("[rank 5]") for line in lines) == 200
    log = (tmp_path / "rank-5.log").read_text()
    assert len(log.splitlines()) > 200
    assert log.endswith("RuntimeError: the first\n")


def test_a_rank_that_closes_its_wire_is_an_error():
    def task(context):
        # No limit tells which there are: it may be lower than some, or none.
        os.closerange(3, max(int(each.name) for each in Path("/dev/fd").iterdir()) + 1)

    error, seconds = fails(task, ranks=1)
    assert error.rank == 0
    assert seconds < 10


def test_much_output_without_a_newline_stops_nobody():
    def task(context):
        sys.stdout.write("x" * 5_000_000)
        return "done"

    assert run(task, ["cpu"] * 2, group=False, echo=False) == ["done", "done"]
