"""CPU ranks that compute at once without a pause, against one that computes alone with its part of the cores."""

from collections.abc import Callable, Sequence
from typing import Any

from kway.devices.cpu import threads_for
from kway.measuring.bench import Bench, Row
from kway.measuring.figure import Figure
from kway.measuring.hidden import find, slowdown_figure
from kway.measuring.in_step import InStep, Remaining, control
from kway.measuring.step_work import ALONE, AT_ONCE, KINDS, counts, sustained, with_threads
from kway.measuring.timer import Candidate, Policy, Reading, Work

NAME, SLOWER = "ranks beside each other", "ranks beside each other: slowdown"


def rows(ranks: Sequence[int]) -> list[Row]:
    """Return a row for each kind of work, number of ranks and way; ranks do the work."""
    return [
        Row(NAME, {"of": kind, "ranks": count, "way": way}, lambda count: 0.0)
        for count in ranks
        for kind in KINDS
        for way in (ALONE, AT_ONCE)
    ]


def on_rank(rank: int, kind: str, ranks: int, way: str) -> Callable[[], Work]:
    """Return what makes a rank's work: the first one's alone, or that of ``ranks`` of them; the others wait."""

    def make() -> Work:
        if rank >= (1 if way == ALONE else ranks):
            return lambda count: 0.0
        return with_threads(KINDS[kind].make, threads_for(ranks))

    return make


def task(context: Any, ranks: Sequence[int], policy: Policy, asked_at: float) -> Reading:
    """Time all ways on this rank, one of all that there are."""
    world = context.world
    group = control(world, world.size)
    assert group is not None
    in_step = InStep(group)
    asked = rows(ranks)
    allowed = sustained(Remaining(in_step, policy, asked_at).part(1, 1), len(asked))
    candidates = [
        Candidate(row.title, in_step.work(on_rank(world.rank, *row.parameters.values()))) for row in asked
    ]
    return in_step.time(candidates, "cpu", allowed)


def run(bench: Bench, part: float) -> list[Figure]:
    """Measure all CPU ranks, and fewer of them."""
    ranks = counts(bench.cpu_ranks, bench.sizes["every_number"])
    asked = rows(ranks)
    figures = bench.figures(asked, bench.on(["cpu"] * bench.cpu_ranks, part, task, ranks))
    return figures + compared(bench, figures, NAME, SLOWER, "ranks")


def compared(bench: Bench, figures: Sequence[Figure], name: str, slower: str, of: str) -> list[Figure]:
    """Return how many times as long each kind of work takes at once, by the number of ranks or threads."""
    make, found = bench.maker(bench.readings[-1]), []
    asked = dict.fromkeys((figure.parameters["of"], figure.parameters[of]) for figure in figures)
    for kind, count in asked:
        at = {"of": kind, of: count}
        alone, at_once = (find(figures, name, way=way, **at) for way in (ALONE, AT_ONCE))
        if alone and at_once:
            found.append(slowdown_figure(make, slower, dict(at), alone, at_once))
    return found
