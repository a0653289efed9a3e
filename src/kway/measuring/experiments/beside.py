"""What ranks and threads cost each other in a step: side by side, in collectives after work, in turns."""

from kway.measuring import after_work, behind_work, ranks_beside, threads_beside
from kway.measuring.bench import Bench
from kway.measuring.budget import Seconds
from kway.measuring.experiment import Experiment
from kway.measuring.figure import Figure
from kway.measuring.work import Call


def run(bench: Bench) -> list[Figure]:
    """Measure GPUs, CPU ranks where there are no two GPUs, or all is measured, and threads."""
    figures = behind_work.run(bench, 1.0) if len(bench.gpus) > 1 else []
    if bench.cpu_ranks < 2:
        bench.notes.append("one CPU device here: no ranks or threads of a CPU beside each other")
        return figures
    if _has_ranks(bench):
        figures += ranks_beside.run(bench, 0.3)
        figures += after_work.run(bench, 0.4)
    return figures + threads_beside.run(bench, 0.3)


def start(bench: Bench) -> Call:
    """Start the ranks."""
    on_gpus = [list(bench.gpus)] if len(bench.gpus) > 1 else []
    on_cpu = [["cpu"] * bench.cpu_ranks] if bench.cpu_ranks > 1 and _has_ranks(bench) else []
    return bench.started(*on_gpus, *on_cpu)


def _has_ranks(bench: Bench) -> bool:
    return len(bench.gpus) < 2 or bool(bench.sizes["cpu_beside_gpus"])


EXPERIMENT = Experiment(
    name="beside",
    summary="ranks and threads of one CPU beside each other, collectives after work, turns of threads",
    run=run,
    # Those sizes first that most models need: there may be no room for all.
    quick={
        "after_work": {
            "all-reduce": tuple(1 << k for k in (20, 10, 15, 24)),
            "all-gather": tuple(1 << k for k in (10, 20)),
            "ordered tree reduction": tuple(1 << k for k in (10, 20)),
        },
        "behind_work": {
            "all-reduce": tuple(1 << k for k in (10, 20, 15, 24)),
            "all-gather": (1 << 10, 1 << 15),
        },
        "sums": tuple(1 << k for k in (20, 10, 24)),
        "cpu_beside_gpus": False,
        "every_number": False,
    },
    full={
        "after_work": dict.fromkeys(
            ("all-reduce", "all-gather", "ordered tree reduction"), tuple(1 << k for k in range(10, 27, 4))
        ),
        "behind_work": dict.fromkeys(("all-reduce", "all-gather"), tuple(1 << k for k in range(10, 27, 4))),
        "sums": tuple(1 << k for k in range(10, 27, 4)),
        "cpu_beside_gpus": True,
        "every_number": True,
    },
    quick_s=Seconds(9.0, cpu=2.5, gpu=0.8),
    full_s=Seconds(90.0, cpu=60.0, gpu=10.0, more=5.0),
    start=start,
    order=55,
    version=2,
)
