"""Who is late: the decision by itself, and jobs that make no progress."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

import kway
from kway.cli.main import main
from kway.errors import MispairedError, StallError, UsageError
from kway.launch.address import listening_socket, rank_variables
from kway.launch.local import Ranks
from kway.launch.own_watch import watching
from kway.launch.script import launch
from kway.launch.stacks import readable
from kway.launch.stall import behind, check_together, described, is_late, left_out, waited_for
from kway.launch.status import STEP, Report
from kway.world import World

# Longer than a step takes where much else runs on the machine.
SOON = timedelta(seconds=2)


def report(rank, step=3, calls=7, since=100.0, phase=STEP, waiting=False):
    return Report(rank, step, calls, since, phase, waiting)


@pytest.mark.parametrize(
    ("reports", "late"),
    [
        ([report(0, waiting=True, calls=8), report(1)], 1),
        ([report(0, waiting=True, calls=8), report(1, phase="input", calls=7)], 1),
        ([report(0, step=4, calls=2), report(1, step=3, calls=9)], 1),
        ([report(0, waiting=True), report(1)], 1),
        ([report(0, waiting=True, calls=7), report(1, waiting=True, calls=8)], 0),
        ([report(0, phase="main only"), report(1, waiting=True, calls=8)], 0),
        ([report(0, phase="", step=0, calls=0), report(1, phase="start", step=0)], 0),
        ([report(0, phase="idle", step=2), report(1)], 1),
        ([report(0, phase="idle", step=2), report(1, waiting=True)], 0),
    ],
    ids=["forward", "input", "step", "equal", "calls", "main", "not-begun", "done", "left-out"],
)
def test_the_late_rank_is_the_one_that_the_others_wait_for(reports, late):
    found = behind(reports)
    assert found is not None
    assert found.rank == late


def test_a_stopped_rank_is_the_late_one_of_those_inside_the_same_collective():
    both = [report(0, waiting=True), report(1, waiting=True)]
    assert behind(both, {1}).rank == 1
    assert behind(both, {0}).rank == 0
    # But not one that has come further than another.
    assert behind([report(0, calls=6), report(1)], {1}).rank == 0


def test_a_rank_that_left_is_told_from_one_that_may_still_come():
    left, waits = report(0, phase="idle", calls=7), report(1, waiting=True, calls=8, since=100.0)
    assert left_out([left, waits], now=106.0) == left
    assert left_out([left, waits], now=104.0) is None
    assert left_out([left, report(1, calls=8)], now=106.0) is None
    # The other one has opened a new session, where its collectives are counted from 1.
    assert left_out([left, report(1, phase="start", waiting=True, calls=1)], now=106.0) is None
    assert described(left, [left, waits], now=106.0).startswith("left after step 3 at ")


def test_ranks_that_wait_at_different_places_will_never_meet():
    saves, steps = report(0, phase="save", waiting=True), report(1, step=4, waiting=True)
    with pytest.raises(
        MispairedError, match="rank 0 at step 3, save, inside a collective; rank 1 at step 4, reduce"
    ):
        check_together([saves, steps], now=106.0)
    check_together([saves, steps], now=104.0)
    check_together([report(0, waiting=True), report(1, waiting=True)], now=900.0)
    # One of them is still on its way out of the collective before.
    check_together([saves, report(1, step=4, calls=8, waiting=True)], now=900.0)
    check_together([saves, report(1, step=4)], now=900.0)
    check_together([saves, report(1, phase="idle")], now=900.0)


def test_who_waited_for_a_rank_that_left():
    left, further = report(0, step=8, phase="idle"), report(1, step=8, calls=8, phase="idle")
    assert waited_for(0, [left, further, report(2, step=8)]) == "rank 1 waited for it after step 8"
    assert waited_for(0, [left, further, report(2, step=9)]) == "ranks 1, 2 waited for it in step 9"
    assert waited_for(1, [left, further]) == ""


def test_without_work_nobody_is_late():
    assert behind([report(0, phase="idle"), report(1, phase="idle")]) is None
    assert behind([report(0, phase=""), report(1, phase="")]) is None


@pytest.mark.parametrize(
    ("phase", "other", "expected"),
    [
        (STEP, report(1, waiting=True), True),
        (STEP, report(1), True),
        ("start", report(1, phase="start"), True),
        ("tune", report(1, phase="tune", waiting=True), True),
        ("main only", report(1, waiting=True), False),
        ("own code", report(1, waiting=True), True),
        ("own code", report(1, phase="own code"), False),
        ("", report(1, phase="start"), True),
        ("", report(1, phase="own code"), False),
    ],
)
def test_what_others_may_wait_for_is_no_stall(phase, other, expected):
    late = report(0, phase=phase)
    begins = phase in {"", "start", "tune"}
    assert is_late(late, [late, other], now=221.0 if begins else 191.0, timeout=90) is expected
    assert is_late(late, [late, other], now=219.0 if begins else 189.0, timeout=90) is False
    assert is_late(late, [late, other], now=401.0, timeout=300) is expected


def test_the_message_says_where_everybody_is():
    ranks = [
        report(0, waiting=True),
        report(1, phase="input"),
        report(2, waiting=True),
        report(3, phase="idle"),
    ]
    text = described(ranks[1], ranks, now=192.0)
    assert text.startswith("is late: step 3, input, no progress since ")
    assert text.endswith("(1 min 32 s); ranks 0, 2 at step 3, reduce; rank 3 done")


def test_a_dump_is_read_as_a_traceback_of_the_main_thread(tmp_path):
    code = tmp_path / "model.py"
    code.write_text("def forward():\n    wait_for_ever()\n")
    dump = (
        'Current thread 0x00007f01 (most recent call first):\n  File "threading.py", line 3 in wait\n\n'
        f'Thread 0x00007f00 (most recent call first):\n  File "{code}", line 2 in forward\n'
        '  File "loop.py", line 9 in run\n  File "<string>", line 1 in <module>\n'
    )
    assert readable(dump).splitlines() == [
        '  File "loop.py", line 9, in run',
        f'  File "{code}", line 2, in forward',
        "    wait_for_ever()",
    ]


class Sleeps(nn.Linear):
    """Sleeps in the third forward pass on rank 1."""

    def __init__(self):
        super().__init__(3, 2)
        self.count = 0

    def forward(self, x):
        self.count += self.training
        if self.count == 3 and os.environ.get("RANK", "1") == "1":
            time.sleep(600)  # the line
        return super().forward(x)


def job_of(model=Sleeps, **more):
    x = torch.randn(32, 3, generator=torch.Generator().manual_seed(0))
    sgd = partial(torch.optim.SGD, lr=0.1)
    more = {"data": (x, torch.arange(32) % 2), **more}
    return kway.Job(model=model, loss=nn.CrossEntropyLoss(), optimizer=sgd, batch_size=4, **more)


@pytest.fixture
def two():
    """Two ranks of this test's own, which have started: a loaded machine takes longer for that than for the rest."""
    with Ranks(["cpu"] * 2, threads=1, echo=False) as ranks:
        ranks.run(lambda context: None)
        yield ranks


def stalls(task, ranks, timeout=SOON):
    began = time.monotonic()
    with pytest.raises(StallError) as caught:
        ranks.run(task, stall_timeout=timeout)
    assert time.monotonic() - began < timeout.total_seconds() + 15
    return caught.value


@pytest.mark.starts
@pytest.mark.usefixtures("leftovers")
def test_a_rank_that_sleeps_in_forward_is_named_with_step_phase_and_line(two):
    with pytest.raises(StallError) as caught:
        kway.train(job_of(), devices="cpu:2", ranks=two, stall_timeout="2s")
    error = caught.value
    assert (error.rank, error.exit_code) == (1, 1)
    *stack, last = str(error).splitlines()
    assert last.startswith("rank 1 is late: step 3, forward/backward, no progress since ")
    assert last.endswith("; rank 0 at step 3, reduce")
    assert stack[0] == "Stack of rank 1 (most recent call last):"
    assert stack[-1].strip() == "time.sleep(600)  # the line"
    assert "worker.py" not in str(error)


@pytest.mark.starts
@pytest.mark.usefixtures("leftovers", "forks")
def test_a_stopped_rank_is_said_to_be_stopped(two):
    def task(context):
        group = kway_group(context)
        for step in range(1, 100):
            context.status.at(STEP, step)
            if step == 5 and context.world.rank == 1:
                os.kill(os.getpid(), signal.SIGSTOP)
            group.barrier()

    def kway_group(context):
        from kway.comm.group import Group

        return Group(context.world.rank, context.world.size, waiting=context.status.waiting)

    error = stalls(task, two)
    assert error.rank == 1
    assert "step 5, " in str(error)
    assert str(error).endswith("its process is stopped (SIGSTOP) and shows no stack")


def test_work_that_all_wait_for_is_no_stall_and_slow_steps_are_progress(ranks):
    def task(context, job):
        with kway.parallel(job, strategy="data") as p:
            with p.first_on_main():
                if p.is_main:
                    time.sleep(1.6)
            for batch in p.batches(0):
                time.sleep(0.15)
                p.step(batch)
            return p.steps

    ranks.run(lambda context: None)
    steps = ranks.of(2).run(
        task, job_of(partial(nn.Linear, 3, 2)), size=2, stall_timeout=timedelta(seconds=1)
    )
    assert steps == [8, 8]


def test_no_time_limit_of_torch_is_shorter(ranks):
    def limits(context):
        from torch.distributed.distributed_c10d import _get_default_group

        group = _get_default_group()
        return group._get_backend(torch.device("cpu")).options._timeout

    ranks.run(lambda context: None)
    day = timedelta(days=1)
    assert min(ranks.of(2).run(limits, size=2, stall_timeout=timedelta(hours=20))) > day
    assert max(ranks.of(2).run(limits, size=2)) < day


def test_the_first_rank_s_turn_has_no_time_limit(ranks):
    """Case H07: whatever limit the group has."""

    def task(context, job):
        import torch.distributed as dist
        from torch.distributed.distributed_c10d import _set_pg_timeout

        with kway.parallel(job, strategy="data") as p:
            _set_pg_timeout(timedelta(seconds=0.3), dist.group.WORLD)
            order = []
            for _ in range(2):
                with p.first_on_main():
                    time.sleep(0.8 if p.is_main else 0)
                    order.append(time.monotonic())
            _set_pg_timeout(timedelta(seconds=60), dist.group.WORLD)
            return p.gather(order)

    first, second = ranks.run(task, job_of(partial(nn.Linear, 3, 2)))[0]
    assert all(a <= b for a, b in zip(first, second, strict=True))


SCRIPT = """
import os, sys, time
from functools import partial
import kway, torch
from torch import nn

job = kway.Job(model=partial(nn.Linear, 3, 2), loss=nn.CrossEntropyLoss(), optimizer=partial(torch.optim.SGD, lr=0.1),
               data=(torch.zeros(32, 3), torch.arange(32) % 2), batch_size=4)
with kway.parallel(job, stall_timeout=LIMIT) as p:
    for batch in p.batches(0):
        if p.steps == 2 and p.rank == LATE:
            STUCK
        p.step(batch)
"""


@pytest.fixture
def script(tmp_path):
    def write(stuck, late=1, limit=None):
        path = tmp_path / "script.py"
        path.write_text(
            SCRIPT.replace("STUCK", stuck).replace("LATE", str(late)).replace("LIMIT", str(limit))
        )
        return str(path)

    return write


@pytest.mark.starts
@pytest.mark.usefixtures("leftovers", "forks")
def test_a_script_of_the_user_is_watched_too(script, tmp_path):
    with pytest.raises(StallError) as caught:
        launch(
            script("time.sleep(600)"),
            [],
            ["cpu"] * 2,
            threads=1,
            echo=False,
            logs=tmp_path,
            stall_timeout=SOON,
        )
    lines = str(caught.value).splitlines()
    assert lines[-1].startswith("rank 1 is late: step 3, own code, no progress since ")
    assert lines[-2].strip() == "time.sleep(600)"
    assert "script.py" in lines[-3]
    assert "time.sleep" not in (tmp_path / "rank-0.log").read_text()
    assert "Thread 0x" in (tmp_path / "rank-1.log").read_text()


@pytest.mark.starts
@pytest.mark.usefixtures("leftovers", "forked_commands")
def test_ranks_of_another_launcher_watch_themselves(script):
    path, port = script("time.sleep(600)", limit=2), free_port()
    started = [
        subprocess.Popen(
            [sys.executable, path],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **rank_variables(rank, 2, port), "OMP_NUM_THREADS": "1"},
        )
        for rank in (0, 1)
    ]
    said = [process.communicate(timeout=60)[1].splitlines() for process in started]
    assert started[1].returncode == 1
    assert "kway: error: rank 1 is late: step 3, own code, no progress since" in said[1][-1]
    assert said[1][-1].endswith("; rank 0 at step 3, reduce")
    assert said[1][-2].strip() == "time.sleep(600)"
    assert "is late" not in "".join(said[0])


def free_port():
    with listening_socket() as listener:
        return listener.getsockname()[1]


@pytest.mark.parametrize("rank", [0, 1])
def test_where_the_late_rank_cannot_speak_the_first_of_the_others_does(rank, monkeypatch, capsys):
    """Rank 2 said that it was in step 5, and then nothing more: its process is stopped."""
    store, ended = dist.HashStore(), threading.Event()
    monkeypatch.setattr("kway.launch.own_watch._store", lambda: store)
    monkeypatch.setattr("os._exit", lambda code: ended.set())
    store.set("status/2", json.dumps([9, 5, 0, 0.0, STEP, False]))
    store.set(f"status/{1 - rank}", json.dumps([9, 6, 0, 0.0, STEP, True]))
    with watching(World(rank=rank, size=3), timedelta(seconds=0.4)) as status:
        status.at(STEP, 6)
        with status.waiting:
            assert ended.wait(10)
    said = capsys.readouterr().err
    if rank == 0:
        assert said.startswith("kway: error: rank 2 is late: step 5, forward/backward, no progress since ")
        assert said.endswith("it did not answer: its process is stopped, or stuck outside of Python\n")
    else:
        assert said == ""


def test_a_process_that_is_alone_is_interrupted():
    with pytest.raises(StallError) as caught:
        kway.train(job_of(), devices="cpu:1", stall_timeout=1)
    assert "rank 0 is late: step 3, forward/backward, no progress since" in str(caught.value)
    assert "time.sleep(600)  # the line" in caught.value.traceback


def test_ctrl_c_stays_ctrl_c():
    with pytest.raises(KeyboardInterrupt), watching(World(), timedelta(seconds=60)):
        raise KeyboardInterrupt


@pytest.mark.parametrize("text", ["0", "-3s", "soon", "5 parsecs", "1e3", "inf"])
def test_a_time_that_is_none_is_refused_before_anything_starts(text, capsys, tmp_path):
    out = tmp_path / "run"
    words = [["train", "lenet", "--out", str(out)], ["launch", "--devices", "cpu:2"]]
    script = tmp_path / "script.py"
    script.write_text("print('started')")
    for command, *rest in words:
        tail = [str(script)] if command == "launch" else []
        assert main([command, *rest, f"--stall-timeout={text}", *tail]) == 2
        shown = capsys.readouterr()
        assert "it must be a time above zero, like 90s, 5min or 2h" in shown.err
        assert len(shown.err.splitlines()) == 1
        assert "started" not in shown.out
    assert not out.exists()
    with pytest.raises(UsageError, match="stall_timeout"):
        kway.train(job_of(), devices="cpu:2", stall_timeout=text)
