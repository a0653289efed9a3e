"""A rank that is slow for the others is named, and one that has more to do is not."""

import os
import time
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import kway
from kway.launch.status import Status
from kway.training.straggler import (
    LEAST,
    LEAST_OF_PART,
    PARTS,
    WARM_UP,
    OwnWork,
    Work,
    own_work,
    slow_ranks,
)


def works(*own_ms, samples=None, step_ms=None):
    """What each rank measured where it took the same time in all parts of the run."""
    whole = part(*own_ms, samples=samples, step_ms=step_ms)
    return [replace(work, parts=(work,) * PARTS) for work in whole]


def part(*own_ms, samples=None, step_ms=None):
    step = max(own_ms) + 2 if step_ms is None else step_ms
    counts = samples or [8] * len(own_ms)
    return [Work(own / 1e3, step / 1e3, count) for own, count in zip(own_ms, counts, strict=True)]


def test_a_slow_rank_is_named_with_what_it_costs():
    assert slow_ranks(works(20, 20, 31, 20)) == [
        "rank 2 is slow: its own work takes 31 ms a step, the others' 20 ms (median): every step waits 11 ms for it"
    ]
    assert slow_ranks(works(31, 20))[0].startswith("rank 0 is slow")


@pytest.mark.parametrize(
    "even",
    [
        works(20, 20, 20),
        works(20, 21, 20.5),
        works(20, 21.9, 20),  # under 10 percent of 20 + 2
        works(20, 25, step_ms=100),  # most of a step is something else
        works(20),
        works(31, 31, 20),  # one that is fast is no straggler
    ],
)
def test_even_ranks_are_not(even):
    assert slow_ranks(even) == []


def test_all_that_are_slow_are_named():
    assert [line[:6] for line in slow_ranks(works(31, 20, 20, 20, 31))] == ["rank 0", "rank 4"]


def test_a_larger_share_is_not_slowness():
    assert slow_ranks(works(30, 20, samples=[3, 2])) == []
    assert slow_ranks(works(45, 20, samples=[3, 2]))[0].endswith("every step waits 15 ms for it")
    assert slow_ranks(works(5, 20, samples=[0, 2])) != []


def test_who_is_slow_for_a_part_of_the_run_only_is_not_named():
    later = zip(*[part(20, 31)] * 4, part(20, 20), strict=True)
    assert slow_ranks([replace(w, parts=p) for w, p in zip(part(20, 31), later, strict=True)]) == []
    turns = zip(*[part(20, 31), part(31, 20)] * 2, part(20, 31), strict=True)
    assert slow_ranks([replace(w, parts=p) for w, p in zip(part(20, 31), turns, strict=True)]) == []


def test_after_few_steps_nobody_is_named():
    assert slow_ranks(part(20, 31)) == []


def test_where_a_rank_was_not_measured_nothing_is_said():
    found = [*works(31, 20), None]
    assert slow_ranks(found) == []
    assert own_work(found) is None
    assert own_work(works(31, 20)) == [0.031, 0.02]


@pytest.fixture
def now(monkeypatch):
    hand = SimpleNamespace(s=50.0)
    clock = SimpleNamespace(perf_counter=lambda: hand.s, monotonic=lambda: hand.s)
    monkeypatch.setattr("kway.training.straggler.time", clock)
    monkeypatch.setattr("kway.launch.status.time", clock)
    return hand


def test_own_work_is_the_step_without_the_wait_for_others(now):
    status = Status()
    own = OwnWork(status)
    for step in range(WARM_UP + LEAST):
        assert own.work() is None
        own.begin()
        now.s += 100.0 if step < WARM_UP else 3.0
        with status.waiting:
            now.s += 4.0
        now.s += 1.0
        own.end(samples=5)
        now.s += 1000.0
        own.end(samples=99)
    assert own.work() == Work(4.0, 8.0, 5)


def test_parts_follow_one_another(now):
    own = OwnWork(Status())
    for step in range(WARM_UP + PARTS * LEAST_OF_PART):
        assert step <= WARM_UP + LEAST or own.work().parts == ()
        own.begin()
        now.s += step
        own.end(samples=1)
    middles = [work.own_s for work in own.work().parts]
    assert middles == [WARM_UP + LEAST_OF_PART * (place + 0.5) - 0.5 for place in range(PARTS)]


class Slow(nn.Linear):
    """Takes its time on one rank."""

    def __init__(self, rank):
        super().__init__(3, 2)
        self.rank = rank

    def forward(self, x):
        if os.environ.get("RANK") == str(self.rank):
            time.sleep(0.01)
        return super().forward(x)


def run(ranks, slow, size=2):
    job = kway.Job(
        model=partial(Slow, slow), loss=nn.CrossEntropyLoss(), optimizer=partial(torch.optim.SGD, lr=0.1),
        data=(torch.zeros(440, 3), torch.arange(440) % 2), batch_size=4,
    )  # fmt: skip
    return kway.train(job, devices=f"cpu:{size}", ranks=ranks, epochs=1).record


def test_a_run_names_its_straggler(ranks):
    record = run(ranks, slow=1)
    lines = [line for line in record.notices if "is slow" in line]
    assert len(lines) == 1
    assert lines[0].startswith("rank 1 is slow: its own work takes ")
    assert len(record.own_work_s) == 2
    # It sleeps 10 ms a step; what else the machine does takes from the difference.
    assert record.own_work_s[1] - record.own_work_s[0] > 0.003


def test_one_device_is_measured_too_and_names_nobody(ranks):
    record = run(ranks, slow=0, size=1)
    assert [line for line in record.notices if "is slow" in line] == []
    assert len(record.own_work_s) == 1
