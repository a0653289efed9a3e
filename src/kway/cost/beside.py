"""What ranks, or threads, of one CPU cost each other: read from what was measured of them at work side by side."""

import math
from typing import Any

from kway.cost.curve import between, rising
from kway.measurements import Measurements

EXPERIMENT = "beside"
RANKS, THREADS = "ranks", "threads"
LARGE, SMALL = "large operations", "small operations"


def slowdowns(measurements: Measurements | None, of: str, count: int) -> dict[str, float]:
    """Return how many times as long ``count`` ``ranks`` or ``threads`` take beside each other as one alone, by work.

    Measured over tenths of a second without a pause, each with its part of the cores: what is short meets others'
    pauses, and steps do not. At least 1: nobody gets faster for company. Of the number that was measured and is nearest
    (the larger one of two), by what an operation is bound by: ``LARGE`` ones compute, ``SMALL`` ones are started. Where
    only one kind was measured the other one has the same; empty where none was.
    """
    name = f"{of} beside each other: slowdown"
    figures = {kind: _nearest(measurements, name, of, count, {"of": kind}) for kind in (LARGE, SMALL)}
    known = [max(1.0, each["value"]) for kind in figures for each in figures[kind][:1]]
    return dict(zip((LARGE, SMALL), (known[0], known[-1]), strict=True)) if known else {}


def turns_s(measurements: Measurements | None, threads: int) -> float | None:
    """Return the seconds that ``threads`` threads take in a step to begin and to end side by side, and for their turns.

    One thread after the other has a turn, so that another number of them than was measured takes as much a thread.
    ``None`` where none was measured.
    """
    figures = _nearest(measurements, "turns of threads", THREADS, threads)
    return figures[0]["value"] * threads / figures[0]["parameters"][THREADS] if figures else None


def thread_sum_s(measurements: Measurements | None, threads: int, size: float) -> float | None:
    """Return the seconds of a sum of ``size`` bytes over exactly so many threads; ``None`` where that was not measured.

    Between two sizes a straight line of the logarithms, below them the time of the smallest, beyond them the line
    through the largest two; not known beyond a single size, whose time is mostly latency. More bytes never cost less.
    """
    points = [
        (figure["parameters"]["bytes"], figure["value"])
        for figure in _figures(measurements, "sum of threads")
        if figure["parameters"][THREADS] == threads and figure["value"] > 0
    ]
    if not points:
        return None
    curve = rising(points)
    largest, slowest = curve[-1]
    if size <= largest:
        return between(curve, max(size, curve[0][0]), math.log)
    if len(curve) == 1:
        return None
    smaller, faster = curve[-2]
    return slowest + (slowest - faster) / (largest - smaller) * (size - largest)


def _nearest(
    measurements: Measurements | None, name: str, of: str, count: int, at: dict[str, Any] | None = None
) -> list[dict[str, Any]]:
    """Return the figures of the nearest number of ranks or threads."""
    found = [
        figure
        for figure in _figures(measurements, name)
        if (at or {}).items() <= figure["parameters"].items()
    ]
    known = {figure["parameters"][of] for figure in found}
    nearest = min(known, key=lambda each: (abs(each - count), -each), default=None)
    return [figure for figure in found if figure["parameters"][of] == nearest]


def _figures(measurements: Measurements | None, name: str) -> list[dict[str, Any]]:
    return [] if measurements is None else measurements.find(EXPERIMENT, name)
