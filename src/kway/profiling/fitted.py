"""A line through times by share size: what a step costs whatever it holds, and what each sample adds."""

from collections.abc import Sequence


def line_through(samples: Sequence[float], seconds: Sequence[float]) -> tuple[float, float, float]:
    """Return (fixed, per sample, largest relative residual) of the best line with neither part below 0.

    Best: least squares of relative residuals, the sum of ((a + b n - t) / t)^2, as a time is known to a part of itself.
    Of the two ways to hold a part at 0 the better one where the free line has a negative part (with two unknowns this
    is the whole of non-negative least squares: Lawson and Hanson, "Solving least squares problems", 1974, chapter 23).
    One size alone tells nothing of a fixed part: all counts for the samples.
    """
    pairs = [(n, t) for n, t in zip(samples, seconds, strict=True) if t > 0]
    if not pairs:
        return 0.0, 0.0, 0.0
    ways = [_through_zero(pairs), (_level(pairs), 0.0)]
    if len({n for n, _ in pairs}) > 1:
        free = _free(pairs)
        if min(free) >= 0:
            ways = [free]
    else:
        ways = ways[:1]
    fixed, each = min(ways, key=lambda way: sum(_relative(way, n, t) ** 2 for n, t in pairs))
    return fixed, each, max(abs(_relative((fixed, each), n, t)) for n, t in pairs)


def _relative(way: tuple[float, float], samples: float, seconds: float) -> float:
    return (way[0] + way[1] * samples - seconds) / seconds


def _free(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    weights = [1 / t**2 for _, t in pairs]
    total = sum(weights)
    mean_n = sum(w * n for w, (n, _) in zip(weights, pairs, strict=True)) / total
    mean_t = sum(w * t for w, (_, t) in zip(weights, pairs, strict=True)) / total
    across = sum(w * (n - mean_n) ** 2 for w, (n, _) in zip(weights, pairs, strict=True))
    both = sum(w * (n - mean_n) * (t - mean_t) for w, (n, t) in zip(weights, pairs, strict=True))
    each = both / across
    return mean_t - each * mean_n, each


def _through_zero(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    return 0.0, sum(n / t for n, t in pairs) / sum((n / t) ** 2 for n, t in pairs)


def _level(pairs: Sequence[tuple[float, float]]) -> float:
    return sum(1 / t for _, t in pairs) / sum(1 / t**2 for _, t in pairs)
