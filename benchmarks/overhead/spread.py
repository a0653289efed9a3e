"""How settled a series of timings is."""

from collections.abc import Sequence
from itertools import pairwise
from statistics import median

BLOCKS = 5


def block_spread(values: Sequence[float]) -> float:
    """Return (max - min) / median over the medians of BLOCKS consecutive blocks of ``values``.

    A drift of the machine shows as a difference between blocks, single outliers vanish in the medians, and
    more values make it smaller. Infinite for fewer than BLOCKS values.
    """
    if len(values) < BLOCKS:
        return float("inf")
    edges = [index * len(values) // BLOCKS for index in range(BLOCKS + 1)]
    medians = [median(values[start:stop]) for start, stop in pairwise(edges)]
    return (max(medians) - min(medians)) / median(medians)


def quartile_spread(values: Sequence[float]) -> float:
    """Return the distance of the quartiles over the median: how much single rounds differ."""
    ordered = sorted(values)
    count = len(ordered)
    return (ordered[(3 * count) // 4] - ordered[count // 4]) / median(ordered)
