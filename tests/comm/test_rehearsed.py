"""A group of which one rank is there: results have the shapes of real ones, and every call is noted."""

import torch

from kway.comm.group import Group
from kway.comm.rehearsed import Call, Calls, RehearsedGroup


def _used(context):
    group = Group(context.world.rank, context.world.size)
    return _shapes(group)


def _shapes(group):
    vector = torch.arange(6.0)
    return [
        group.stack(vector.view(2, 3)).shape,
        group.sum_(vector.clone()).shape,
        group.exchange(
            vector, [2, 4] if group.rank == 0 else [3, 3], [2, 3] if group.rank == 0 else [4, 3]
        )().shape,
        group.broadcast_(vector.clone()).shape,
        len(group.objects("mine")),
    ]


def test_results_have_the_shapes_of_two_real_ranks(ranks):
    real = ranks.run(_used, size=2)[0]
    assert _shapes(RehearsedGroup(Calls(), 0, 2)) == real


def test_a_gather_is_ones_own_as_often_as_there_are_ranks_and_a_sum_is_as_it_was():
    group = RehearsedGroup(Calls(), 0, 3)
    vector = torch.tensor([1.0, 2.0])
    assert group.stack(vector).tolist() == [[1.0, 2.0]] * 3
    assert group.sum_(vector).tolist() == [1.0, 2.0]
    group.begin_sum(vector)()
    assert vector.tolist() == [1.0, 2.0]
    group.barrier()


def test_calls_are_noted_with_their_bytes_while_somebody_notes():
    calls = Calls()
    group = RehearsedGroup(calls, 0, 2)
    group.stack(torch.zeros(3))
    assert calls.made == []
    calls.noting, calls.when = True, "forward"
    group.stack(torch.zeros(3))
    group.apart().begin_sum(torch.zeros(4, dtype=torch.float64))
    group.apart().begin_sums([torch.zeros(2), torch.zeros(3)])()
    assert calls.made == [
        Call("forward", "all-gather", 12, False),
        Call("forward", "all-reduce", 32, True),
        Call("forward", "all-reduce", 20, True),
    ]


def test_the_trace_takes_note_as_it_does_of_real_ones():
    group = RehearsedGroup(Calls(), 0, 2)
    before = group.trace.begun
    group.sum_(torch.zeros(1))
    group.apart().sum_(torch.zeros(1))
    assert group.trace.begun == before + 2
