"""Latency and bandwidth, as figures: those of times by size."""

from collections.abc import Sequence
from typing import Any

from kway.measuring.figure import Figure, Maker
from kway.measuring.fit import hinge, line

NOTE = "fitted to all sizes: seconds = latency + bytes / bandwidth"
QUEUED_NOTE = (
    "fitted to all sizes: seconds = the longer of latency and bytes / bandwidth, because one is launched while the one "
    "before it goes on"
)


def fitted(
    make: Maker,
    names: tuple[str, str],
    parameters: dict[str, Any],
    points: Sequence[tuple[float, float]],
    limit: float | None = None,
    queued: bool = False,
) -> list[Figure]:
    """Return both figures, by ``names``, with the errors of the fit; none where the times say nothing of a bandwidth.

    ``points``: (bytes, seconds), ascending. ``limit``: of the bandwidth. ``queued``: none was waited for before
    the next one was launched.
    """
    fit = (hinge if queued else line)([size for size, _ in points], [seconds for _, seconds in points])
    if fit is None or fit.per_unit_s <= 0:
        return []
    note = QUEUED_NOTE if queued else NOTE
    latency = max(fit.latency_s, 0.0)
    sure = fit.latency_error_s / latency if latency else None
    return [
        make.computed(names[0], parameters, "s", latency, sure, notes=(note,)),
        make.computed(names[1], parameters, "B/s", fit.bandwidth, fit.bandwidth_spread, limit, (note,)),
    ]
