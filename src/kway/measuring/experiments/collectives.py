"""What ranks take to exchange data: by collective, back end, number of ranks and size."""

import time
from collections.abc import Sequence
from typing import Any

from kway.measuring.bench import Bench
from kway.measuring.collective_ranks import Part, task, title
from kway.measuring.collectives import ALL_REDUCE, COLLECTIVES, ORDERED, WIDTH, bus_factor, elements_of
from kway.measuring.experiment import Experiment
from kway.measuring.figure import Figure, Maker
from kway.measuring.fit import line
from kway.measuring.timer import Reading

TIME, ALGORITHM, BUS = "time", "algorithm bandwidth", "bus bandwidth"
LATENCY, BANDWIDTH = "fitted latency", "fitted bandwidth"
MIB = 1 << 20


def run(bench: Bench) -> list[Figure]:
    """Measure on all GPUs, and on CPU ranks where there are no two GPUs, or all is measured."""
    figures: list[Figure] = []
    sets = device_sets(bench)
    if not sets:
        bench.notes.append("one device here: there is nobody to send to")
    for kind, devices in sets:
        figures += _measured(bench, kind, devices, 1 / len(sets))
    return figures


def device_sets(bench: Bench) -> list[tuple[str, list[str]]]:
    """Return (kind, a device for each rank) of the sets of ranks to start."""
    sets = []
    if len(bench.gpus) > 1:
        sets.append(("GPUs", list(bench.gpus)))
    if bench.cpu_ranks > 1 and (not sets or bench.sizes["cpu_beside_gpus"]):
        sets.append(("CPU ranks", ["cpu"] * bench.cpu_ranks))
    return sets


def _measured(bench: Bench, kind: str, devices: list[str], part_of: float) -> list[Figure]:
    assert bench.on_ranks is not None
    sizes = bench.sizes["bytes_cpu" if devices[0] == "cpu" else "bytes_gpu"]
    policy = bench.part(part_of)
    readings: Sequence[tuple[Part, Reading]] = bench.on_ranks(devices, task, sizes, policy, time.time())[0]
    figures, fits = [], []
    for part, reading in readings:
        bench.readings.append(reading)
        make = bench.maker(reading)
        limit = bus_limit(bench, devices[: part.ranks])
        figures += figures_of(make, kind, part, reading, sizes, limit)
        fits += fitted(make, kind, part, reading, sizes)
        noted = ratio(part, reading, sizes)
        bench.notes += [f"{part.backend} on {part.ranks} {kind}: {noted}"] if noted else []
    return figures + sorted(fits, key=lambda figure: figure.name)


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


def fitted(make: Maker, kind: str, part: Part, reading: Reading, sizes: Sequence[int]) -> list[Figure]:
    """Return latency and algorithm bandwidth of each collective, by least squares, with their errors."""
    figures = []
    note = "fitted to all sizes: seconds = latency + bytes / bandwidth"
    for collective in COLLECTIVES:
        timed = [(size, reading.timings.get(title(collective, size))) for size in sizes]
        points = [
            (elements_of(size, part.ranks) * WIDTH, timing.seconds)
            for size, timing in timed
            if timing is not None
        ]
        fit = line([size for size, _ in points], [seconds for _, seconds in points])
        if fit is None or fit.per_unit_s <= 0:
            continue
        parameters = {"collective": collective, "backend": part.backend, "ranks": part.ranks}
        latency = max(fit.latency_s, 0.0)
        sure = fit.latency_error_s / latency if latency else None
        of = f"{part.backend} on {kind}"
        figures += [
            make.computed(f"{LATENCY}, {of}", parameters, "s", latency, sure, notes=(note,)),
            make.computed(
                f"{BANDWIDTH}, {of}", parameters, "B/s", fit.bandwidth, fit.bandwidth_spread, notes=(note,)
            ),
        ]
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


EXPERIMENT = Experiment(
    name="collectives",
    summary="all-reduce and the others, by back end, number of ranks and size; latency and bandwidth",
    run=run,
    quick={
        "bytes_gpu": tuple(1 << k for k in (10, 15, 20, 25, 30)),
        "bytes_cpu": tuple(1 << k for k in (10, 15, 20, 24)),
        "cpu_beside_gpus": False,
    },
    full={
        "bytes_gpu": tuple(1 << k for k in range(10, 31, 2)),
        "bytes_cpu": tuple(1 << k for k in range(10, 27, 2)),
        "cpu_beside_gpus": True,
    },
    quick_s=9.0,
    full_s=120.0,
    by_gpu=0.1,
    order=50,
)
