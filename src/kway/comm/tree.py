"""A sum in one order for any number of ranks: a binary tree over shards, never over ranks.

The leaves are the shards 0 to n - 1. A node over m > 1 shards has on its left the largest power of two below m
and on its right the rest. Who computes a node does not enter, so that every number of ranks gives the same bits.
"""

from collections.abc import Callable, Mapping
from typing import TypeVar

import torch

from kway.comm.group import Group

T = TypeVar("T")
Span = tuple[int, int]


def halves(span: Span) -> tuple[Span, Span]:
    """Cut a span (start, stop) of at least two shards as the tree does."""
    start, stop = span
    middle = start + (1 << ((stop - start - 1).bit_length() - 1))
    return (start, middle), (middle, stop)


def whole_subtrees(start: int, stop: int, shards: int) -> list[Span]:
    """List the largest nodes of the tree over ``shards`` shards that lie within [start, stop), in order."""

    def within(node: Span) -> list[Span]:
        if node[0] >= stop or node[1] <= start:
            return []
        if start <= node[0] and node[1] <= stop:
            return [node]
        left, right = halves(node)
        return within(left) + within(right)

    return within((0, shards)) if start < stop else []


def fold(span: Span, leaf: Callable[[Span], T | None], add: Callable[[T, T], T]) -> T:
    """Sum a node: ``leaf(span)`` where it knows the node, else its halves, ``add(left, right)``."""
    known = leaf(span)
    if known is not None:
        return known
    left, right = halves(span)
    return add(fold(left, leaf, add), fold(right, leaf, add))


class TreeReducer:
    """Completes the tree over the ranks of ``group``, each of which holds a run of shards.

    ``held``: the run (start, stop) of each rank, in rank order, together all of the ``shards``.
    """

    def __init__(self, group: Group, shards: int, held: list[Span]) -> None:
        self.group, self.shards = group, shards
        self.spans = [whole_subtrees(start, stop, shards) for start, stop in held]

    @property
    def own(self) -> list[Span]:
        """The nodes that this rank sums by itself."""
        return self.spans[self.group.rank]

    def reduce(self, partials: Mapping[Span, torch.Tensor]) -> torch.Tensor:
        """Return the root of the tree, given this rank's nodes as flat tensors of one length. A collective."""
        return self.begin(partials)()

    def begin(self, partials: Mapping[Span, torch.Tensor]) -> Callable[[], torch.Tensor]:
        """Start a reduction; what is returned completes it. Both are collectives, in one order on all ranks.

        Each rank sums one slice of the vector over all nodes; slices are exchanged before and gathered after.
        """
        first = partials[self.own[0]]
        if self.group.size == 1:
            return lambda: fold((0, self.shards), partials.get, torch.add)
        size = self.group.size
        length = -(-first.numel() // size)
        if len(self.own) == 1:
            mine = first.new_zeros(size * length)
            mine[: first.numel()].copy_(first)
        else:
            mine = first.new_zeros(size, len(self.own), length)
            for place, span in enumerate(self.own):
                padded = torch.nn.functional.pad(partials[span], (0, size * length - first.numel()))
                mine[:, place] = padded.view(size, length)
        counts = [len(spans) * length for spans in self.spans]
        answer = self.group.exchange(mine.view(-1), [len(self.own) * length] * size, counts)

        def complete() -> torch.Tensor:
            slices: dict[Span, torch.Tensor] = {}
            for spans, block in zip(self.spans, torch.split(answer(), counts), strict=True):
                slices.update(zip(spans, block.view(len(spans), length), strict=True))
            own_slice = fold((0, self.shards), slices.get, torch.add)
            return self.group.stack(own_slice).view(-1)[: first.numel()]

        return complete
