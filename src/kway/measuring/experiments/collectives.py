"""What ranks take to exchange data: by collective, back end, number of ranks and size."""

import time
from collections.abc import Sequence

from kway.measuring.bench import Bench
from kway.measuring.collective_figures import bus_limit, figures_of, lines_of, ratio
from kway.measuring.collective_ranks import Part, task
from kway.measuring.experiment import Experiment
from kway.measuring.figure import Figure
from kway.measuring.timer import Reading


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
    # Those of all ranks come first, then how latency and bandwidth change with their number.
    whole: list[Figure] = []
    fits: list[Figure] = []
    fewer: list[Figure] = []
    for part, reading in readings:
        bench.readings.append(reading)
        make = bench.maker(reading)
        limit = bus_limit(bench, devices[: part.ranks])
        found = whole if part.ranks == len(devices) else fewer
        found += figures_of(make, kind, part, reading, sizes, limit)
        fits += lines_of(make, kind, part, reading, sizes)
        noted = ratio(part, reading, sizes)
        bench.notes += [f"{part.backend} on {part.ranks} {kind}: {noted}"] if noted else []
    return whole + sorted(fits, key=lambda figure: figure.name) + fewer


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
    quick_s=7.5,
    full_s=120.0,
    order=50,
)
