"""What curves of figures say: latency and bandwidth, the size from which one way is faster than another, a knee."""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Fit:
    """``latency_s`` and ``per_unit_s`` of size, each with its standard error: seconds are their sum (``line``), or the
    longer of the two (``hinge``).
    """

    latency_s: float
    latency_error_s: float
    per_unit_s: float
    per_unit_error_s: float

    @property
    def bandwidth(self) -> float:
        """Units a second for large sizes; infinite where size costs nothing."""
        return 1 / self.per_unit_s if self.per_unit_s > 0 else math.inf

    @property
    def bandwidth_spread(self) -> float:
        """By which part of itself the bandwidth is uncertain."""
        return abs(self.per_unit_error_s / self.per_unit_s) if self.per_unit_s else math.inf


def line(sizes: Sequence[float], seconds: Sequence[float]) -> Fit | None:
    """Fit latency and time by unit of size by least squares of the relative residuals; ``None`` below three points.

    Relative, because times go over many orders of magnitude, and each is known to a part of itself: the sum of
    ((a + b x - t) / t)^2 is smallest. The errors are those of this linear problem, from what is left of its residuals
    over (points - 2) degrees of freedom (any text on weighted linear regression).
    """
    if len(sizes) < 3 or len(set(sizes)) < 2:
        return None
    weights = [1 / t**2 for t in seconds]
    total = sum(weights)
    mean_x = sum(w * x for w, x in zip(weights, sizes, strict=True)) / total
    mean_t = sum(w * t for w, t in zip(weights, seconds, strict=True)) / total
    across = sum(w * (x - mean_x) ** 2 for w, x in zip(weights, sizes, strict=True))
    slope = (
        sum(w * (x - mean_x) * (t - mean_t) for w, x, t in zip(weights, sizes, seconds, strict=True)) / across
    )
    start = mean_t - slope * mean_x
    residual = sum(w * (start + slope * x - t) ** 2 for w, x, t in zip(weights, sizes, seconds, strict=True))
    variance = residual / (len(sizes) - 2)
    return Fit(
        start, math.sqrt(variance * (1 / total + mean_x**2 / across)), slope, math.sqrt(variance / across)
    )


def hinge(sizes: Sequence[float], seconds: Sequence[float]) -> Fit | None:
    """Fit seconds = max(latency, size * time by unit), by least squares of the relative residuals as in ``line``.

    That is what one of many costs that are queued: while it goes on the next one is launched, and the longer of both
    counts. Each split of the ascending ``sizes`` into those where the latency counts and those where size does is a
    linear problem; the best one is taken. ``None`` below three points.
    """
    if len(sizes) < 3 or len(set(sizes)) < 2:
        return None
    best: tuple[float, float, float, int] | None = None
    for split in range(1, len(sizes)):
        start = sum(1 / t for t in seconds[:split]) / sum(1 / t**2 for t in seconds[:split])
        rest = list(zip(sizes[split:], seconds[split:], strict=True))
        slope = sum(x / t for x, t in rest) / sum((x / t) ** 2 for x, t in rest)
        residual = sum((max(start, slope * x) / t - 1) ** 2 for x, t in zip(sizes, seconds, strict=True))
        if best is None or residual < best[0]:
            best = residual, start, slope, split
    assert best is not None
    residual, start, slope, split = best
    variance = residual / (len(sizes) - 2)
    flat = sum(1 / t**2 for t in seconds[:split])
    rising = sum((x / t) ** 2 for x, t in zip(sizes[split:], seconds[split:], strict=True))
    return Fit(start, math.sqrt(variance / flat), slope, math.sqrt(variance / rising))


def crossing(sizes: Sequence[float], one: Sequence[float], other: Sequence[float]) -> float | None:
    """Return the size from which ``other`` takes less time than ``one``, and stays below; ``None`` where it never does.

    ``sizes`` ascend. Between two of them the logarithms of the times are taken as straight lines over that of the size.
    The smallest size where ``other`` takes less time from the start.
    """
    ahead = [b < a for a, b in zip(one, other, strict=True)]
    if not ahead or not ahead[-1]:
        return None
    first = max((index + 1 for index, is_ahead in enumerate(ahead) if not is_ahead), default=0)
    if first == 0:
        return sizes[0]
    before, after = (math.log(one[i] / other[i]) for i in (first - 1, first))
    part = -before / (after - before)
    low, high = math.log(sizes[first - 1]), math.log(sizes[first])
    return math.exp(low + part * (high - low))


def knee(counts: Sequence[int], rates: Sequence[float], share: float = 0.9) -> int:
    """Return the smallest count whose rate is ``share`` of the largest rate: more of them gain little."""
    enough = share * max(rates)
    return min(count for count, rate in zip(counts, rates, strict=True) if rate >= enough)
