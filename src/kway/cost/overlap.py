"""How much of a reduction stays to be seen when it goes on beside backward, bucket by bucket."""

import math
from collections.abc import Sequence
from typing import Any

from kway.cost.compute import line_s
from kway.cost.curve import between
from kway.measurements import Measurements


def cut(gradient_bytes: float, limit: float, layers: Sequence[dict[str, Any]]) -> list[float]:
    """Return the bytes of each bucket, in the order of sending: the last layers first, ``limit`` bytes or just above.

    As ``kway.comm.buckets.cut`` cuts parameters; here all of a layer comes together.
    """
    weights = [layer["parameter_bytes"] for layer in reversed(layers)]
    total = sum(weights)
    if total <= 0 or gradient_bytes <= limit:
        return [gradient_bytes]
    found, held = [], 0.0
    for weight in weights:
        held += gradient_bytes * weight / total
        if held >= limit:
            found.append(held)
            held = 0.0
    # What is known after backward only travels with the last one, however small it is.
    return [*found, held] if held > 0 else found


def complete_at(buckets: Sequence[float], layers: Sequence[dict[str, Any]], samples: float) -> list[float]:
    """Return for each bucket the part of backward after which it is complete. The last one waits for all of it.

    ``buckets``: bytes, in the order of sending. Backward reaches the last layer first; layers are taken in their order,
    each with its own part of the backward time, and without times with its part of the bytes.
    """
    weights = [layer["parameter_bytes"] for layer in reversed(layers)]
    times = [line_s(layer["backward"], samples) for layer in reversed(layers)]
    if sum(times) <= 0:
        times = [float(weight) for weight in weights]
    total, whole = sum(weights), sum(times)
    found, sent = [], 0.0
    for size in buckets[:-1]:
        sent += size
        wanted = sent / sum(buckets) * total
        there = gone = 0.0
        for weight, seconds in zip(weights, times, strict=True):
            there, gone = there + weight, gone + seconds
            # To the last digit a sum of sums is not the sum.
            if there >= wanted * (1 - 1e-9):
                break
        found.append(gone / whole if whole > 0 else 1.0)
    return [*found, 1.0]


def exposed_s(buckets: Sequence[tuple[float, float]], backward_s: float, slowdown: float = 1.0) -> float:
    """Return by how much backward and the reduction of ``buckets`` take longer together than backward alone.

    ``buckets``: (seconds of its reduction, part of backward after which it can begin), in order; one at a time. While
    a reduction goes on, backward advances ``1 / slowdown`` as fast (Li et al., "PyTorch Distributed", VLDB 2020,
    section 3.2.3, for buckets that overlap with backward; the slowdown is that of products beside an all-reduce, see
    ``slowdown_of``). What is not hidden is the tail behind backward, and what backward lost.
    """
    now, done = 0.0, 0.0
    factor = max(1.0, slowdown)
    for seconds, ready in buckets:
        # Backward runs alone until the bucket is complete.
        wanted = ready * backward_s
        if wanted > done:
            now += wanted - done
            done = wanted
        # Then beside the reduction, as long as there is any of it left.
        beside = min(seconds, (backward_s - done) * factor)
        done += beside / factor
        now += seconds
    return max(0.0, now + max(0.0, backward_s - done) - backward_s)


def slowdown_of(measurements: Measurements | None, size: float) -> float:
    """Return how many times as long products take beside an all-reduce of ``size`` bytes as alone; at least 1.

    Measured (``kway measure --only overlap``), between two sizes on a line of logarithms, beyond them the nearest
    one. 1 where it was not measured.
    """
    points = sorted(
        (figure["parameters"]["bytes"], max(1.0, figure["value"]))
        for figure in (measurements.figures if measurements is not None else [])
        if figure["experiment"] == "overlap"
        and figure["name"] == "slowdown beside an all-reduce"
        and figure["parameters"].get("of") == "products"
    )
    if not points:
        return 1.0
    return between(points, min(max(size, points[0][0]), points[-1][0]), math.log)
