"""Fewer of the combinations of three or more lists: any value of one still meets any value of any other."""

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any


def pairwise(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return rows with a value of each axis, so that any two values of two axes are in one row, at least.

    Rows are taken from the full product, each time one with the most pairs that none has yet (greedily, and the
    first of several: the rows are the same in every run).
    """
    rows = list(product(*map(range, map(len, axes))))
    open_pairs = {pair for row in rows for pair in _pairs(row)}
    chosen = []
    while open_pairs:
        best = max(rows, key=lambda row: sum(pair in open_pairs for pair in _pairs(row)))
        open_pairs -= set(_pairs(best))
        chosen.append(tuple(axis[place] for axis, place in zip(axes, best, strict=True)))
    return chosen


def _pairs(row: tuple[int, ...]) -> Iterator[tuple[int, int, int, int]]:
    for first, one in enumerate(row):
        for second in range(first + 1, len(row)):
            yield first, one, second, row[second]
