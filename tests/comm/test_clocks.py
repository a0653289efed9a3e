"""How clocks of ranks stand to each other."""

import time

from kway.comm.clocks import Offset, offsets, this_clock
from kway.comm.group import Group


def measured(context, ahead_s):
    """Return what this rank finds where each rank stands for a machine of its own, the second one's clock ahead."""
    group = Group(context.world.rank, context.world.size)
    ahead = ahead_s if group.rank else 0.0
    found = offsets(group, f"machine {group.rank}", lambda: time.monotonic() + ahead)
    return found, offsets(group)


def test_the_bounds_of_another_clock_hold_and_one_clock_needs_none(ranks):
    for ahead in (123.25, -0.5):
        found = ranks.run(measured, ahead)
        assert found[0] == found[1], "all ranks know the same"
        (first, second), same = found[0]
        assert first == Offset(0.0, 0.0)
        assert 0 < second.within_s < 1
        assert abs(second.seconds - ahead) <= second.within_s + 1e-9
        assert same == [Offset(), Offset()]


def test_one_machine_has_one_clock(ranks):
    assert set(ranks.run(lambda context: this_clock())) == {this_clock()}
