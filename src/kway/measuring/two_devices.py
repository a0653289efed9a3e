"""Two devices at once against one after the other: the same products on each."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from kway.measuring.bench import Bench, Row
from kway.measuring.figure import Figure
from kway.measuring.hidden import find, hidden_figure
from kway.measuring.in_step import InStep, Remaining, control
from kway.measuring.reference import normal
from kway.measuring.timer import Candidate, Policy, Reading, Work
from kway.measuring.work import Call, lazily, waited
from kway.units import seconds_text

FIRST, SECOND, IN_TURN, AT_ONCE = "first alone", "second alone", "one after the other", "at once"
WAYS = (FIRST, SECOND, IN_TURN, AT_ONCE)
PRODUCTS = 50
NAME = f"two devices, {PRODUCTS} products each"
HIDDEN = "two devices: hidden, of the shorter"
CPU_RANKS = ("cpu", "cpu")


def multiplier(device: str, size: int, products: int) -> Call:
    """Return a call that multiplies two matrices of size x size so many times, into memory that is there."""
    a, b = (normal(device, torch.float32, size, size) for _ in range(2))
    out = torch.empty_like(a)

    def call() -> None:
        for _ in range(products):
            torch.mm(a, b, out=out)

    return call


def on_gpus(gpus: Sequence[str], way: str, size: int) -> Work:
    """Return the work of one way, launched by this process on two GPUs, until both are done."""

    def make() -> Work:
        first, second = (multiplier(gpu, size, PRODUCTS) for gpu in gpus)

        def wait() -> None:
            for gpu in gpus:
                torch.cuda.synchronize(gpu)

        def in_turn() -> None:
            first()
            torch.cuda.synchronize(gpus[0])
            second()
            # So that the next repeat does not begin beside it.
            torch.cuda.synchronize(gpus[1])

        def at_once() -> None:
            first()
            second()

        return waited({FIRST: first, SECOND: second, IN_TURN: in_turn, AT_ONCE: at_once}[way], wait)

    return lazily(make)


def on_rank(world: Any, meet: Call, way: str, size: int) -> Callable[[], Work]:
    """Return what makes the work of one way on one of two CPU ranks; ``meet`` waits for the other one."""

    def make() -> Work:
        multiply = multiplier("cpu", size, PRODUCTS)

        def call() -> None:
            if way == AT_ONCE or (world.rank == 0 and way != SECOND):
                multiply()
            if way == IN_TURN:
                meet()
            if world.rank == 1 and way in (SECOND, IN_TURN):
                multiply()
            if way == IN_TURN:
                meet()

        return waited(call, lambda: None)

    return make


def task(context: Any, sizes: Sequence[int], policy: Policy, asked_at: float) -> Reading:
    """Time all ways on two CPU ranks."""
    group = control(context.world, context.world.size)
    assert group is not None
    in_step = InStep(group)
    allowed = Remaining(in_step, policy, asked_at).part(1, 1)
    candidates = [
        Candidate(
            row.title,
            in_step.work(on_rank(context.world, group.barrier, row.parameters["way"], row.parameters["n"])),
            row.family,
            row.work,
        )
        for row in rows(sizes)
    ]
    return in_step.time(candidates, "cpu", allowed)


def rows(sizes: Sequence[int], gpus: Sequence[str] = ()) -> list[Row]:
    """Return a row for each size and way, with its work on two GPUs; without, ranks do it."""
    return [
        Row(NAME, {"way": way, "n": size}, on_gpus(gpus, way, size), family=way, work=float(size) ** 3)
        for size in sizes
        for way in WAYS
    ]


def run(bench: Bench, part: float) -> list[Figure]:
    """Measure two GPUs, or two CPU ranks where there are none."""
    gpus = bench.gpus[:2]
    if len(gpus) > 1:
        figures = bench.measure(rows(bench.sizes["n"], gpus), gpus[0], part)
    else:
        sizes = bench.sizes["n_cpu"]
        reading = bench.on(CPU_RANKS, part, task, sizes)
        figures = bench.figures(rows(sizes), reading)
        bench.notes += meetings(figures)
    return figures + _compared(bench, figures)


def meetings(figures: Sequence[Figure]) -> list[str]:
    """Say what two CPU ranks take to take turns: the way one after the other has it beside both works."""
    said = []
    for size in dict.fromkeys(figure.parameters["n"] for figure in figures):
        first, second, turns = (find(figures, NAME, n=size, way=way) for way in (FIRST, SECOND, IN_TURN))
        if first and second and turns and turns.value > first.value + second.value:
            more = turns.value - first.value - second.value
            said.append(f"{seconds_text(more)} at n = {size}")
    where = f"{NAME}: ranks that work {IN_TURN} meet twice, and take longer than both alone by"
    return [f"{where} {', '.join(said)}"] if said else []


def _compared(bench: Bench, figures: Sequence[Figure]) -> list[Figure]:
    found = []
    for size in dict.fromkeys(figure.parameters["n"] for figure in figures):
        timed = [find(figures, NAME, n=size, way=way) for way in (FIRST, SECOND, AT_ONCE)]
        first, second, both = timed
        if first and second and both:
            make = bench.maker(bench.readings[-1])
            found.append(hidden_figure(make, HIDDEN, {"n": size}, first, second, both))
    return found
