"""What the times of collectives say: bandwidths beside the limit of the links, latencies, what order costs."""

from collections.abc import Sequence
from typing import Any

from kway.measuring.bench import Bench
from kway.measuring.collective_ranks import Part, title
from kway.measuring.collectives import ALL_REDUCE, COLLECTIVES, ORDERED, WIDTH, bus_factor, elements_of
from kway.measuring.figure import Figure, Maker
from kway.measuring.fitted import fitted
from kway.measuring.timer import Reading

TIME, ALGORITHM, BUS = "time", "algorithm bandwidth", "bus bandwidth"
LATENCY, BANDWIDTH = "fitted latency", "fitted bandwidth"


def bus_limit(bench: Bench, devices: Sequence[str]) -> float | None:
    """Return what a GPU's links carry each way, where every two of the GPUs have the same ones between them."""
    known = {bench.limits.peer.get((a, b)) for a in devices for b in devices if a != b}
    return known.pop() if len(known) == 1 else None


def figures_of(
    make: Maker, kind: str, part: Part, reading: Reading, sizes: Sequence[int], limit: float | None
) -> list[Figure]:
    """Return time, algorithm bandwidth and bus bandwidth of a part: three pictures, a curve for each collective."""
    where = f"{part.backend} on {part.ranks} {kind}"
    figures = []
    for name in (TIME, ALGORITHM, BUS):
        for collective in COLLECTIVES:
            for size in sizes:
                timing = reading.timings.get(title(collective, size))
                if timing is None:
                    continue
                factor = bus_factor(collective, part.ranks) if name == BUS else 1.0
                sent = elements_of(size, part.ranks) * WIDTH * factor
                parameters = {
                    "collective": collective, "backend": part.backend, "ranks": part.ranks, "bytes": size
                }  # fmt: skip
                # Gloo goes through CPU memory: links between GPUs are no limit of it.
                bound = limit if name == BUS and part.backend == "nccl" else None
                rate = None if name == TIME else sent
                figures.append(_figure(make, f"{name}, {where}", parameters, timing.raw, rate, bound))
    return figures


def _figure(
    make: Maker,
    name: str,
    parameters: dict[str, Any],
    seconds: Sequence[float],
    sent: float | None,
    limit: float | None,
) -> Figure:
    """Make a figure of times, or of what is ``sent`` a second."""
    if sent is None:
        return make.timed(name, parameters, "s", seconds)
    return make.timed(name, parameters, "B/s", seconds, lambda each: sent / each, limit)


def lines_of(make: Maker, kind: str, part: Part, reading: Reading, sizes: Sequence[int]) -> list[Figure]:
    """Return latency and algorithm bandwidth of each collective, by least squares, with their errors."""
    of = f"{part.backend} on {kind}"
    names = f"{LATENCY}, {of}", f"{BANDWIDTH}, {of}"
    figures = []
    for collective in COLLECTIVES:
        timed = [(size, reading.timings.get(title(collective, size))) for size in sizes]
        points = [
            (elements_of(size, part.ranks) * WIDTH, timing.seconds)
            for size, timing in timed
            if timing is not None
        ]
        parameters = {"collective": collective, "backend": part.backend, "ranks": part.ranks}
        figures += fitted(make, names, parameters, points)
    return figures


def ratio(part: Part, reading: Reading, sizes: Sequence[int]) -> str:
    """Say what a sum in one order costs beside the back end's own, at the smallest and the largest size of both."""
    both = {}
    for size in sizes:
        own, ordered = (reading.timings.get(title(name, size)) for name in (ALL_REDUCE, ORDERED))
        if own is not None and ordered is not None:
            both[size] = ordered.seconds / own.seconds
    ends = dict.fromkeys((min(both, default=0), max(both, default=0)))
    said = " and ".join(f"{both[size]:.2f} times at {size:,} bytes" for size in ends if size in both)
    return f"an {ORDERED} takes the time of an {ALL_REDUCE} {said}" if said else ""
