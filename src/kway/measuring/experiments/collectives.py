"""What ranks take to exchange data: by collective, back end, number of ranks and size."""

from collections.abc import Sequence
from dataclasses import replace

from kway.measuring.bench import Bench
from kway.measuring.budget import Seconds
from kway.measuring.collective_figures import bus_limit, figures_of, lines_of, ratio
from kway.measuring.collective_ranks import Part, parts, task
from kway.measuring.experiment import Experiment
from kway.measuring.figure import Figure
from kway.measuring.timer import Reading
from kway.measuring.work import Call


def run(bench: Bench) -> list[Figure]:
    """Measure on all GPUs, and on CPU ranks where there are no two GPUs, or all is measured."""
    figures: list[Figure] = []
    sets = device_sets(bench)
    if not sets:
        bench.notes.append("one device here: there is nobody to send to")
    for kind, devices in sets:
        figures += _measured(bench, kind, devices)
    return figures


def device_sets(bench: Bench) -> list[tuple[str, list[str]]]:
    """Return (kind, a device for each rank) of the sets of ranks to start. Each has a budget of its own."""
    sets = []
    if len(bench.gpus) > 1:
        sets.append(("GPUs", list(bench.gpus)))
    if bench.cpu_ranks > 1 and (not sets or bench.sizes["cpu_beside_gpus"]):
        sets.append(("CPU ranks", ["cpu"] * bench.cpu_ranks))
    return sets


def start(bench: Bench) -> Call:
    """Start the ranks."""
    return bench.started(*(devices for _, devices in device_sets(bench)))


def _measured(bench: Bench, kind: str, devices: list[str]) -> list[Figure]:
    on_cpu = devices[0] == "cpu"
    by_backend = (
        {"gloo": bench.sizes["bytes_cpu"]}
        if on_cpu
        else {"nccl": bench.sizes["bytes_gpu"], "gloo": bench.sizes["bytes_gloo"]}
    )
    todo = parts(by_backend, len(devices), bench.sizes["every_number"])
    readings: Sequence[tuple[Part, Reading]] = bench.on(devices, 1.0, task, todo, by_backend)
    # Those of all ranks come first, then how latency and bandwidth change with their number.
    whole: list[Figure] = []
    fits: list[Figure] = []
    fewer: list[Figure] = []
    for part, reading in readings:
        sizes = by_backend[part.backend]
        where = f"{part.backend} on {part.ranks} {kind}"
        named = {f"{name}, {where}": why for name, why in reading.left.items()}
        bench.readings.append(replace(reading, left=named))
        make = bench.maker(reading)
        limit = bus_limit(bench, devices[: part.ranks])
        found = whole if part.ranks == len(devices) else fewer
        found += figures_of(make, kind, part, reading, sizes, limit)
        fits += lines_of(make, kind, part, reading, sizes)
        noted = ratio(part, reading, sizes)
        bench.notes += [f"{where}: {noted}"] if noted else []
    return whole + sorted(fits, key=lambda figure: figure.name) + fewer


EXPERIMENT = Experiment(
    name="collectives",
    summary="all-reduce and the others, by back end, number of ranks and size; latency and bandwidth",
    run=run,
    quick={
        "bytes_gpu": tuple(1 << k for k in (10, 15, 20, 25, 30)),
        "bytes_cpu": tuple(1 << k for k in (10, 15, 20, 24)),
        "bytes_gloo": tuple(1 << k for k in (10, 15, 20, 25)),
        "cpu_beside_gpus": False,
        "every_number": False,
    },
    full={
        "bytes_gpu": tuple(1 << k for k in range(10, 31, 2)),
        "bytes_cpu": tuple(1 << k for k in range(10, 27, 2)),
        "bytes_gloo": tuple(1 << k for k in range(10, 29, 2)),
        "cpu_beside_gpus": True,
        "every_number": True,
    },
    quick_s=Seconds(7.5, gpu=7.0, more=1.0),
    full_s=Seconds(120.0, cpu=60.0, gpu=60.0, more=60.0),
    start=start,
    order=50,
)
