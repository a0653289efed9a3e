"""What a collective takes: read between the sizes that were measured for that many ranks."""

import math
from collections.abc import Sequence
from typing import Any

from kway.cost.curve import between, rising
from kway.errors import NotMeasuredError
from kway.measurements import Measurements

ALL_REDUCE, ALL_GATHER, ORDERED = "all-reduce", "all-gather", "ordered tree reduction"
AFTER_WORK = "collective after work"


def collective_s(
    measurements: Measurements | None,
    backend: str,
    collective: str,
    ranks: int,
    size: float,
    after_work: bool = False,
) -> float:
    """Return the seconds of a collective of ``size`` bytes (of the larger buffer of a rank) among ``ranks`` ranks.

    As one that follows another collective takes; ``after_work``: as one that follows computing, where that was
    measured: on CPUs caches hold other things then, ranks were asleep, and one of them comes last; on GPUs it was
    launched long before. At the sizes where both were measured that is how many times as long it takes, between two of
    them on a straight line of the logarithms; beyond the largest of them as much longer as there, and never less, since
    neither caches nor sleep nor launches grow with what is sent.

    Between two measured sizes a straight line of the logarithms; never one bandwidth, since back ends change their
    algorithm with the size. Below the smallest size its time, which is latency. Beyond the largest one the fitted
    bandwidth for what is more than it (the postal model, t = latency + bytes / bandwidth: Hockney, "The communication
    challenge for MPP", 1994). More bytes never cost less. One rank, or no byte, costs nothing.

    Raises ``NotMeasuredError`` where nothing was measured for this back end, collective and number of ranks.
    """
    if ranks < 2 or size <= 0:
        return 0.0
    asked = {"collective": collective, "backend": backend, "ranks": ranks}
    points = [
        (figure["parameters"]["bytes"], figure["value"])
        for figure in _figures(measurements, "time, ", asked)
        if figure["value"] > 0
    ]
    if not points:
        raise NotMeasuredError(
            f"the time of {collective} among {ranks} ranks through {backend}",
            "it was not measured here",
            f"measure it: kway measure --only collectives{_of(backend, ranks)}",
        )
    curve = rising(points)
    if after_work:
        curve = _after_work(curve, measurements, asked)
    largest, slowest = curve[-1]
    if size <= curve[0][0]:
        return curve[0][1]
    if size <= largest:
        return between(curve, size, math.log)
    fits = _figures(measurements, "fitted bandwidth, ", asked)
    # Without a fit the last size's own rate: it has its latency in it, and is no better than what was seen.
    bandwidth = max((figure["value"] for figure in fits), default=largest / slowest)
    return slowest + (size - largest) / max(bandwidth, largest / slowest)


def _after_work(
    curve: list[tuple[float, float]], measurements: Measurements | None, asked: dict[str, Any]
) -> list[tuple[float, float]]:
    """Return what a collective takes after work, from what it takes after another one."""
    figures = [] if measurements is None else measurements.find("beside", AFTER_WORK, **asked)
    known = {figure["parameters"]["bytes"]: figure["value"] for figure in figures if figure["value"] > 0}
    if not known:
        return curve
    times = sorted((size, taken / _within(curve, size)) for size, taken in known.items())
    sizes = sorted({*known, *(size for size, _ in curve)})
    most = max(known)
    longer = max(0.0, known[most] - _within(curve, most))
    return rising(
        [
            (
                size,
                _within(curve, size) * _within(times, size)
                if size <= most
                else _within(curve, size) + longer,
            )
            for size in sizes
        ]
    )


def _within(points: Sequence[tuple[float, float]], size: float) -> float:
    """Return the value at ``size`` on straight lines of the logarithms, beyond the points that of the nearest."""
    return between(points, min(max(size, points[0][0]), points[-1][0]), math.log)


def measured_ranks(
    measurements: Measurements | None, backend: str, collective: str = ALL_REDUCE
) -> list[int]:
    """List the numbers of ranks for which a collective was measured."""
    found = _figures(measurements, "time, ", {"collective": collective, "backend": backend})
    return sorted({figure["parameters"]["ranks"] for figure in found})


def _figures(
    measurements: Measurements | None, name: str, parameters: dict[str, Any]
) -> list[dict[str, Any]]:
    # Names end with the kind of ranks, which the back end and the devices decide.
    return [
        figure
        for figure in (measurements.figures if measurements is not None else [])
        if figure["experiment"] == "collectives"
        and figure["name"].startswith(name)
        and parameters.items() <= figure["parameters"].items()
    ]


def _of(backend: str, ranks: int) -> str:
    return f" --devices cpu:{ranks}" if backend == "gloo" else ""
