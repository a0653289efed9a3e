"""Timing on ranks: what they agree on."""

import time
from functools import partial

import pytest

from kway.comm.group import Group
from kway.measuring.in_step import InStep, Remaining
from kway.measuring.timer import Candidate, Policy


def agreed(context):
    rank = context.world.rank
    in_step = InStep(Group(rank, context.world.size), clock=lambda: 100.0 + rank)
    work = in_step.work(lambda: lambda count: count * (1.0 + rank))
    return in_step.clock(), work(3), in_step.slowest(5.0 - rank)


def test_the_clock_is_that_of_the_first_rank_and_the_slowest_counts(ranks):
    assert ranks.run(agreed) == [(100.0, 6.0, 5.0)] * 2


def failing(context):
    rank = context.world.rank
    in_step = InStep(Group(rank, context.world.size))

    def make():
        if rank == 1:
            raise MemoryError("no room here")
        return lambda count: count * 1e-3

    def broken(count):
        if rank == 0:
            raise ValueError("not this size")
        return 1e-3

    good = in_step.work(lambda: lambda count: count * 1e-3)
    candidates = [
        Candidate("unmade", in_step.work(make)),
        Candidate("broken", in_step.work(lambda: broken)),
        Candidate("good", good),
    ]
    reading = in_step.time(candidates, "cpu", Policy(seconds=5, sample_s=1e-3, rounds=3))
    return reading.left, list(reading.timings), reading.tries, reading.drift


def test_what_fails_on_one_rank_is_left_out_on_all(ranks):
    first, second = ranks.run(failing)
    assert first == second
    assert first[0] == {
        "unmade": "RuntimeError: MemoryError: no room here",
        "broken": "RuntimeError: ValueError: not this size",
    }
    assert first[1] == ["good"]


def levelled(context):
    order = []
    in_step = InStep(Group(context.world.rank, context.world.size))
    run = in_step.work(lambda: lambda count: order.append("work") or 0.0, partial(order.append, "level"))
    run(1)
    return order


def test_ranks_are_level_before_the_clock_starts(ranks):
    assert ranks.run(levelled) == [["level", "work"]] * 2


def budgets(context, asked_at):
    rank = context.world.rank
    in_step = InStep(Group(rank, context.world.size), clock=lambda: 0.0)
    remaining = Remaining(in_step, Policy(seconds=10), asked_at)
    return remaining.part(1, 4).seconds


@pytest.mark.parametrize(("gone", "quarter"), [(2.0, 2.0), (1000.0, 1.0), (-5.0, 2.5)])
def test_what_ranks_take_to_start_is_part_of_the_budget(ranks, gone, quarter):
    first, second = ranks.run(budgets, time.time() - gone)
    assert first == second
    assert first == pytest.approx(quarter, abs=0.3)
