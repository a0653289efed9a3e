"""How far single steps lie apart: what ranks that meet after each step wait for each other."""

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import median


def scatter(windows: Sequence[Sequence[float]]) -> float | None:
    """Return the standard deviation of single steps over their mean; ``None`` where no window holds two.

    ``windows``: seconds of each step by window. What changes from one window to the next is a change of the machine,
    which meets all ranks alike: steps are compared within a window, and the median window counts. Not the root of mean
    squares, but sqrt(pi) / 2 times Gini's mean difference, which is the same for normal draws (David and Nagaraja,
    "Order Statistics", 2003, section 9.4): the larger of two draws is above their mean by half the mean difference,
    whatever their distribution.
    """
    found = [
        math.sqrt(math.pi) / 2 * mean_difference(steps) / (sum(steps) / len(steps))
        for steps in windows
        if len(steps) > 1 and sum(steps) > 0
    ]
    return median(found) if found else None


def mean_difference(values: Sequence[float]) -> float:
    """Return the mean distance of two different ones of at least two values."""
    ordered, count = sorted(values), len(values)
    # Between neighbours lie as many pairs as there are values below times values above.
    total = sum(place * (count - place) * (b - a) for place, (a, b) in enumerate(pairwise(ordered), start=1))
    return 2 * total / (count * (count - 1))
