"""What experiments are given to start ranks with."""

from kway.comm.group import Group
from kway.jobs.kept_ranks import KeptRanks


def place_of(context, more):
    group = Group(context.world.rank, context.world.size)
    return group.objects((context.world.rank, context.world.device, more))


def test_a_task_runs_on_one_rank_for_each_device(ranks):
    found = KeptRanks(ranks)(["cpu", "cpu"], place_of, 7)
    assert found == [[(0, "cpu", 7), (1, "cpu", 7)]] * 2
