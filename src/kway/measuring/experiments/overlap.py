"""What is gained by doing two things at once: two devices, computing and copying, computing and a collective."""

import time

from kway.measuring import copy_out, two_devices, under_collective
from kway.measuring.bench import Bench
from kway.measuring.experiment import Experiment
from kway.measuring.figure import Figure


def run(bench: Bench) -> list[Figure]:
    """Measure what the devices here can do at once. What the ranks take to start is part of the budget."""
    figures: list[Figure] = []
    enough = len(bench.gpus) > 1 or bench.cpu_ranks > 1
    if not enough:
        bench.notes.append("one device here: there are no two to work at once, and nobody to send to")
    if enough:
        figures += two_devices.run(bench, 0.5, time.time())
    figures += copy_out.run(bench, 0.2)
    if enough:
        figures += under_collective.run(bench, 0.3, time.time())
    return figures


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
    quick_s=6.0,
    full_s=90.0,
    by_gpu=0.15,
    order=40,
)
