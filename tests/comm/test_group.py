"""Collectives with a defined order, and the groups of a mesh."""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist

from kway.comm.group import Group, _together
from kway.comm.mesh import Mesh
from kway.errors import UsageError


def group_of(context):
    return Group(context.world.rank, context.world.size)


def spoken(context):
    group = group_of(context)
    rank = torch.tensor([float(group.rank + 1)])
    group.barrier()
    return {
        "sum": group.sum_(rank.clone()),
        "stack": group.stack(torch.full((2, 1), float(group.rank))),
        "scalar": group.stack(torch.tensor(group.rank)),
        "empty": group.stack(torch.zeros(0, 3)),
        "first": group.broadcast_(rank.clone()),
        "objects": group.objects({"rank": group.rank}),
    }


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_what_ranks_say_to_each_other(ranks, size):
    for found in ranks.run(spoken, size=size):
        assert found["sum"].tolist() == [sum(range(1, size + 1))]
        assert found["stack"].tolist() == [[[float(rank)], [float(rank)]] for rank in range(size)]
        assert found["scalar"].tolist() == list(range(size))
        assert found["empty"].shape == (size, 0, 3)
        assert found["first"].tolist() == [1.0]
        assert found["objects"] == [{"rank": rank} for rank in range(size)]


def begun_together(context):
    group = group_of(context)
    tensors = [torch.full((size,), 1.0 + group.rank) for size in (3, 0, 5)]
    group.begin_sums(tensors)()
    return tensors


@pytest.mark.parametrize("size", [1, 3])
def test_several_tensors_are_summed_as_one_is(ranks, size):
    for found in ranks.run(begun_together, size=size):
        assert [tensor.tolist() for tensor in found] == [
            [sum(range(1, size + 1))] * length for length in (3, 0, 5)
        ]


def test_this_torch_has_what_joins_collectives_on_devices():
    assert _together is not None


class Waits:
    """Takes note of what a rank waits inside of, and of what it only begins."""

    def __init__(self):
        self.seen = []

    def inside(self, name):
        self.seen.append(f"inside {name}")
        return nullcontext()

    def begun(self):
        self.seen.append("begun")


def test_a_rank_waits_inside_of_the_first_collective_on_a_device_whatever_came_before(monkeypatch):
    # No collective is called, so that any device but the CPU will do.
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, group: None)
    waits = Waits()
    group = Group(0, 2, waiting=waits)
    for device in ("cpu", "meta", "meta", "cpu"):
        group.sum_(torch.empty(1, device=device))
    assert waits.seen == ["inside all-reduce", "inside all-reduce", "begun", "inside all-reduce"]


def places(context, layout):
    mesh = Mesh(layout, context.world.rank, context.world.size)
    mine = torch.tensor([context.world.rank])
    return {axis: (mesh.coordinate(axis), mesh.group(axis).stack(mine).view(-1).tolist()) for axis in layout}


def test_a_mesh_is_row_major_and_its_groups_are_its_lines(ranks):
    found = ranks.run(places, {"outer": 2, "inner": 2}, size=4)
    assert [rank["outer"] for rank in found] == [(0, [0, 2]), (0, [1, 3]), (1, [0, 2]), (1, [1, 3])]
    assert [rank["inner"] for rank in found] == [(0, [0, 1]), (1, [0, 1]), (0, [2, 3]), (1, [2, 3])]
    assert [rank["data"] for rank in ranks.run(places, {"data": 3}, size=3)] == [
        (rank, [0, 1, 2]) for rank in range(3)
    ]


def test_a_mesh_must_have_as_many_places_as_ranks():
    with pytest.raises(UsageError, match=r"layout data=3 over 1 ranks: it needs 3"):
        Mesh({"data": 3}, 0, 1)
    assert Mesh({}, 0, 1).world.size == 1
