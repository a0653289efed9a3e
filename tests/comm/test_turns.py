"""The first rank's turn: each series of turns has its own, however late a rank is."""

import time

import torch.distributed as dist

from kway.comm.group import Group
from kway.comm.turns import Turns


def group_of(context):
    return Group(context.world.rank, context.world.size)


def both_open(context):
    """Take turns of two series, the last rank late; return when each rank had its own."""
    group = group_of(context)
    one, other = Turns(group), Turns(group)
    found = []
    for turns in (one, other, one):
        if group.rank == group.size - 1:
            time.sleep(0.3)
        turns.pass_on()
        found.append(time.monotonic())
    return found


def test_a_late_rank_finds_the_turns_of_two_series_that_are_open_at_once(ranks):
    for size in (2, 3):
        first, *others = ranks.run(both_open, size=size, limit=20)
        assert all(a <= b for other in others for a, b in zip(first, other, strict=True))


def early(context):
    """Let the middle rank go on to the next series while the last has not seen the turn of the first one."""
    group = group_of(context)
    one, other = Turns(group), Turns(group)
    if group.rank == 2:
        time.sleep(1)
    one.pass_on()
    if group.rank == 0:
        time.sleep(0.5)
    begun = time.monotonic()
    other.pass_on()
    return begun if group.rank == 0 else time.monotonic()


def test_no_rank_enters_by_the_turn_of_another_series(ranks):
    first, *others = ranks.run(early, size=3, limit=20)
    assert all(first <= other for other in others)


def one_after_the_other(context):
    """Take turns of two series; return what of the last one the store still holds."""
    group = group_of(context)
    for _ in range(2):
        turns = Turns(group)
        for _ in range(3):
            turns.pass_on()
    store = dist.distributed_c10d._get_default_store()
    group.barrier()
    return [store.check([f"kway-turn/{turns._series}/{turn}"]) for turn in (1, 2, 3)]


def test_a_turn_that_all_have_seen_leaves_nothing_in_the_store(ranks):
    assert ranks.run(one_after_the_other, limit=20) == [[False] * 3] * 2


def test_a_rank_alone_waits_for_nobody():
    Turns(Group()).pass_on()
