"""How long ranks wait for the slowest of them, and how much several on one CPU slow each other down."""

from functools import cache
from statistics import NormalDist, median

from kway.measurements import Measurements

# Half the distance of the quartiles of a normal distribution, in standard deviations.
QUARTILE = NormalDist().inv_cdf(0.75)
# Far enough out, and fine enough, that the integral below is right to six digits for 4,096 ranks.
_REACH, _STEPS = 9.0, 4_000


@cache
def expected_maximum(ranks: int) -> float:
    """Return the expected largest of ``ranks`` draws from the standard normal distribution.

    The integral of x k phi(x) Phi(x)^(k - 1) (David and Nagaraja, "Order Statistics", 2003, section 3.1), by Simpson's
    rule: 0.5642 for 2, 0.8463 for 3, 1.0294 for 4. 0 for one.
    """
    if ranks < 2:
        return 0.0
    normal, width = NormalDist(), 2 * _REACH / _STEPS
    total = 0.0
    for place in range(_STEPS + 1):
        x = -_REACH + place * width
        weight = 1 if place in (0, _STEPS) else 4 if place % 2 else 2
        total += weight * x * ranks * normal.pdf(x) * normal.cdf(x) ** (ranks - 1)
    return total * width / 3


def waiting_s(seconds: float, deviation: float, ranks: int) -> float:
    """Return how much longer the slowest of ``ranks`` takes, of which each takes ``seconds``.

    ``deviation``: of single steps, as a part of ``seconds``. The steps of ranks are taken as independent draws from
    a normal distribution: the expected largest of them is above the mean by ``expected_maximum`` standard deviations.
    """
    return seconds * deviation * expected_maximum(ranks)


def side_by_side(measurements: Measurements | None, ranks: int) -> float:
    """Return how many times as long CPU ranks take beside each other as each alone, from bursts of products.

    For machines of which no sustained work was measured (``kway.cost.beside``). Memory, caches and clock are shared.
    Measured as 50 products of two matrices on each of two ranks, at once and alone (``kway measure --only overlap``):
    at once over the longer one alone, the median over sizes; at least 1, since nobody gets faster for company. 1 where
    that was not measured. More than two ranks have the factor of two.
    """
    if ranks < 2 or measurements is None:
        return 1.0
    by_size: dict[int, dict[str, float]] = {}
    for figure in measurements.figures:
        if figure["experiment"] == "overlap" and figure["name"].startswith("two devices, "):
            by_size.setdefault(figure["parameters"]["n"], {})[figure["parameters"]["way"]] = figure["value"]
    ratios = [
        ways["at once"] / max(ways["first alone"], ways["second alone"])
        for ways in by_size.values()
        if {"at once", "first alone", "second alone"} <= set(ways) and ways["first alone"] > 0
    ]
    return max(1.0, median(ratios)) if ratios else 1.0
