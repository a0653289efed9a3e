"""What is gained by doing two things at once: two devices, computing and copying, computing and a collective."""

from kway.measuring import copy_out, two_devices, under_collective
from kway.measuring.bench import Bench
from kway.measuring.budget import Seconds
from kway.measuring.experiment import Experiment
from kway.measuring.figure import Figure
from kway.measuring.work import Call


def run(bench: Bench) -> list[Figure]:
    """Measure what the devices here can do at once."""
    figures: list[Figure] = []
    enough = several(bench)
    if not enough:
        bench.notes.append("one device here: there are no two to work at once, and nobody to send to")
    if enough:
        figures += two_devices.run(bench, 0.5)
    figures += copy_out.run(bench, 0.2)
    if enough:
        figures += under_collective.run(bench, 0.3)
    return figures


def several(bench: Bench) -> bool:
    """Return whether two things can be done at once here."""
    return len(bench.gpus) > 1 or bench.cpu_ranks > 1


def start(bench: Bench) -> Call:
    """Start the ranks."""
    if not several(bench):
        return lambda: None
    return bench.started(
        under_collective.ranks(bench), *(() if len(bench.gpus) > 1 else (two_devices.CPU_RANKS,))
    )


MIB = 1 << 20
EXPERIMENT = Experiment(
    name="overlap",
    summary="two devices at once, copying while computing, computing under a collective: what was hidden",
    run=run,
    quick={
        "n": (1000, 2000, 4000),
        "n_cpu": (64, 128, 192),
        "n_copied": (500, 1000, 2000),
        "beside": (2000, (MIB, 8 * MIB, 64 * MIB)),
        "beside_cpu": (256, (MIB // 64, MIB // 8, MIB)),
    },
    full={
        "n": (250, 500, 1000, 2000, 4000),
        "n_cpu": (64, 128, 256, 512),
        "n_copied": (250, 500, 1000, 2000, 4000),
        "beside": (4000, tuple(MIB << k for k in range(0, 9, 2))),
        "beside_cpu": (512, tuple(MIB // 64 << k for k in range(0, 11, 2))),
    },
    quick_s=Seconds(6.0, cpu=3.0, gpu=7.0),
    full_s=Seconds(90.0, cpu=40.0, gpu=90.0, more=15.0),
    start=start,
    order=40,
)
