"""Times by size: made to rise, and read between the sizes that were measured."""

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence

Points = Sequence[tuple[float, float]]


def rising(points: Points) -> list[tuple[float, float]]:
    """Return points of the same sizes, ascending, whose times never fall: what costs less for more was noise.

    Neighbours that fall are given their mean (of logarithms) until none do: isotonic regression by pooling adjacent
    violators (Barlow, Bartholomew, Bremner and Brunk, "Statistical Inference under Order Restrictions", 1972). Of
    several times of one size the median of the pool is no better than their mean, and they are pooled too.
    """
    pools: list[list[float]] = []  # of each: sum of logarithms, how many
    sizes: list[list[float]] = []
    for size, seconds in sorted(points):
        pools.append([math.log(max(seconds, 1e-12)), 1.0])
        sizes.append([size])
        while len(pools) > 1 and (
            pools[-2][0] / pools[-2][1] > pools[-1][0] / pools[-1][1] or sizes[-2][-1] == sizes[-1][0]
        ):
            total, count = pools.pop()
            pools[-1][0] += total
            pools[-1][1] += count
            higher = sizes.pop()
            sizes[-1] += higher
    made = {
        size: math.exp(total / count)
        for (total, count), held in zip(pools, sizes, strict=True)
        for size in held
    }
    return sorted(made.items())


def between(points: Points, size: float, scale: Callable[[float], float] = lambda value: value) -> float:
    """Return the time at ``size``, which lies within the sizes of ``points``, on a straight line between neighbours.

    ``scale`` of sizes and times: ``math.log`` for a straight line of logarithms.
    """
    place = bisect_right([at for at, _ in points], size)
    if place == 0 or points[place - 1][0] == size:
        return points[max(place - 1, 0)][1]
    if place == len(points):
        return points[-1][1]
    (low, before), (high, after) = points[place - 1], points[place]
    part = (scale(size) - scale(low)) / (scale(high) - scale(low))
    if scale is math.log:
        return float(before * (after / before) ** part)
    return before + part * (after - before)
