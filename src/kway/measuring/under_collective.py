"""Products while an all-reduce goes on beside them: what each costs the other."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from kway.measuring.bench import Bench, Row
from kway.measuring.figure import Figure
from kway.measuring.hidden import find, hidden_figure, slowdown_figure
from kway.measuring.in_step import InStep, Remaining, control
from kway.measuring.sides import PRODUCTS, WAYS, Sides
from kway.measuring.timer import Candidate, Policy, Reading, Work, calibrate

NAME, HIDDEN = "products beside an all-reduce", "all-reduce: hidden, of the shorter"
SLOWDOWN = "slowdown beside an all-reduce"
# Work as long as this tells enough of an all-reduce to choose how many of them take as long as the products.
_LOOK_S = 5e-3
_MOST = 256


def task(
    context: Any, size: int, counts: Sequence[int], policy: Policy, asked_at: float
) -> tuple[dict[int, int], Reading]:
    """Time all ways on this rank; return how many all-reduces there are by bytes, and the reading."""
    world = context.world
    group = control(world, world.size)
    assert group is not None
    in_step = InStep(group)
    remaining = Remaining(in_step, policy, asked_at)
    made = {count: Sides(world.device, size, count) for count in counts}
    for sides in made.values():
        # As many as take about the time of the products: then there is something to hide on either side.
        seconds = [_seconds(in_step.work(lambda sides=sides, way=way: sides.work(way))) for way in WAYS[:2]]  # type: ignore[misc]
        sides.times = repeats(*seconds)
    candidates = [
        Candidate(row.title, in_step.work(_maker(made, row)), row.family, row.work)
        for row in rows(counts, size)
    ]
    reading = in_step.time(candidates, world.device, remaining.part(1, 1))
    return {count: sides.times for count, sides in made.items()}, reading


def _maker(made: dict[int, Sides], row: Row) -> Callable[[], Work]:
    return lambda: made[row.parameters["bytes"]].work(row.parameters["way"])


def _seconds(work: Work) -> float:
    found = calibrate(work, _LOOK_S)
    return found.took / found.repeats


def repeats(compute_s: float, communicate_s: float) -> int:
    """Return how many all-reduces take about as long as the products, at least one."""
    return min(max(1, math.ceil(compute_s / communicate_s)), _MOST) if communicate_s > 0 else 1


def rows(counts: Sequence[int], size: int) -> list[Row]:
    """Return a row for each size of an all-reduce and each way; ranks do their work."""
    return [
        Row(NAME, {"way": way, "n": size, "bytes": count}, lambda count: 0.0)
        for count in counts
        for way in WAYS
    ]


def ranks(bench: Bench) -> list[str]:
    """Return the device of each rank."""
    return list(bench.gpus) if len(bench.gpus) > 1 else ["cpu"] * bench.cpu_ranks


def run(bench: Bench, part: float) -> list[Figure]:
    """Measure on all GPUs, or on CPU ranks where there are no two of them."""
    devices = ranks(bench)
    size, counts = bench.sizes["beside_cpu" if devices[0] == "cpu" else "beside"]
    times, reading = bench.on(devices, part, task, size, counts)
    figures = bench.figures(rows(counts, size), reading)
    said = ", ".join(f"{times[count]} of {count:,} bytes" for count in counts)
    bench.notes.append(
        f"{NAME}: {PRODUCTS} products of {size} x {size} beside as many all-reduces as take about as long: {said}"
    )
    return figures + compared(bench, figures)


def compared(bench: Bench, figures: Sequence[Figure]) -> list[Figure]:
    """Return what was hidden, and the slowdown of both (against the longer one) and of the products."""
    hidden, slower = [], []
    for count in dict.fromkeys(figure.parameters["bytes"] for figure in figures):
        compute, communicate, both, under = (find(figures, NAME, bytes=count, way=way) for way in WAYS)
        if not (compute and communicate and both and under):
            continue
        make = bench.maker(bench.readings[-1])
        at: dict[str, object] = {"n": compute.parameters["n"], "bytes": count}
        longer = max(compute, communicate, key=lambda figure: figure.value)
        hidden.append(hidden_figure(make, HIDDEN, at, compute, communicate, both))
        slower.append(slowdown_figure(make, SLOWDOWN, {"of": "both at once", **at}, longer, both))
        slower.append(slowdown_figure(make, SLOWDOWN, {"of": "products", **at}, compute, under))
    return hidden + slower
