"""One order of summation for any number of ranks."""

import pytest
import torch

from kway.comm.group import Group
from kway.comm.tree import TreeReducer, fold, halves, whole_subtrees
from kway.data.order import bounds


def test_a_node_has_the_largest_power_of_two_on_its_left():
    assert halves((0, 8)) == ((0, 4), (4, 8))
    assert halves((0, 7)) == ((0, 4), (4, 7))
    assert halves((4, 7)) == ((4, 6), (6, 7))
    assert halves((2, 4)) == ((2, 3), (3, 4))
    assert halves((0, 5)) == ((0, 4), (4, 5))


@pytest.mark.parametrize("shards", range(1, 18))
def test_the_runs_of_ranks_are_whole_nodes_that_cover_all(shards):
    nodes = set()

    def walk(span):
        nodes.add(span)
        if span[1] - span[0] > 1:
            for half in halves(span):
                walk(half)

    walk((0, shards))
    for size in range(1, shards + 1):
        spans = [span for rank in range(size) for span in whole_subtrees(*bounds(shards, size, rank), shards)]
        assert set(spans) <= nodes
        assert [shard for start, stop in spans for shard in range(start, stop)] == list(range(shards))
    assert whole_subtrees(0, 0, shards) == []


def test_a_fold_adds_left_to_right_by_halves():
    def leaf(span):
        return str(span[0]) if span[1] - span[0] == 1 else None

    assert fold((0, 5), leaf, lambda a, b: f"({a}{b})") == "(((01)(23))4)"


def leaves(shards, length):
    generator = torch.Generator().manual_seed(shards)
    return torch.randn(shards, length, generator=generator) * 10.0 ** torch.arange(shards).view(
        -1, 1
    ).remainder(5)


def reduced(context, shards, length):
    rank, size = context.world.rank, context.world.size
    values = leaves(shards, length)
    held = [bounds(shards, size, place) for place in range(size)]
    tree = TreeReducer(Group(rank, size), shards, held)

    def leaf(span):
        return values[span[0]].clone() if span[1] - span[0] == 1 else None

    return tree.reduce({span: fold(span, leaf, torch.add) for span in tree.own})


@pytest.mark.parametrize(("shards", "length"), [(4, 10), (8, 7), (7, 1), (5, 3), (8, 1000)])
def test_every_number_of_ranks_gives_the_same_bits(ranks, shards, length):
    values = leaves(shards, length)
    expected = fold((0, shards), lambda s: values[s[0]] if s[1] - s[0] == 1 else None, torch.add)
    for size in (1, 2, 3, 4):
        for found in ranks.run(reduced, shards, length, size=size):
            assert torch.equal(found, expected)
    if length == 1000:  # in rank order the bits would be others: the test can fail
        in_order = values[0].clone()
        for value in values[1:]:
            in_order += value
        assert not torch.equal(in_order, expected)
