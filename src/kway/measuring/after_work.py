"""Collectives of CPU ranks that follow computing, as those of a step do: caches are cold, and who is first waits."""

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import torch

from kway.comm.group import Group
from kway.devices.cpu import threads_for
from kway.measuring.bench import Bench
from kway.measuring.collective_ranks import Part, groups_of, parts, title
from kway.measuring.collectives import ALL_REDUCE, COLLECTIVES, ORDERED, Buffers, elements_of
from kway.measuring.figure import Figure, Maker
from kway.measuring.in_step import InStep, Remaining, control
from kway.measuring.step_work import KINDS, LARGE, sustained, with_threads
from kway.measuring.timer import Candidate, Policy, Reading, Work
from kway.measuring.work import Call

NAME = "collective after work"
WORK = "work alone"
# How many times as long as others a sample is: it has some tens of collectives, whose waits differ.
SUSTAINED = 25
# Those that steps are made of.
ASKED = (ALL_REDUCE, "all-gather", ORDERED)


def cells(sizes: Mapping[str, Sequence[int]]) -> list[tuple[str, int]]:
    """List the collectives and sizes, those first that every step has."""
    return [(collective, size) for collective in ASKED for size in sizes[collective]]


def task(
    context: Any, todo: Sequence[Part], sizes: Mapping[str, Sequence[int]], policy: Policy, asked_at: float
) -> list[tuple[Part, Reading]]:
    """Time the parts ``todo`` on this rank, ``sizes`` by collective; return the reading of each that it is in."""
    world = context.world
    groups = groups_of(world, todo)
    everyone = control(world, world.size)
    assert everyone is not None
    remaining = Remaining(InStep(everyone), policy, asked_at)
    found = []
    for place, part in enumerate(todo):
        measured, controlled = groups[part]
        allowed = remaining.part(1, len(todo) - place)
        if measured is not None and controlled is not None:
            found.append((part, _timed(InStep(controlled), measured, cells(sizes), allowed)))
        # Ranks that are in no smaller group wait here: they would disturb it.
        remaining.meet()
    return found


def _timed(in_step: InStep, group: Group, asked: Sequence[tuple[str, int]], policy: Policy) -> Reading:
    threads, compute = threads_for(group.size), KINDS[LARGE].make
    largest = elements_of(max(size for _, size in asked), group.size)
    buffers = Buffers(group, *(torch.zeros(largest) for _ in range(2)))

    def after(collective: str, size: int) -> Callable[[], Work]:
        make, _ = COLLECTIVES[collective]
        return lambda: with_threads(compute, threads, [make(buffers, elements_of(size, group.size))])

    def alone() -> Call:
        work = with_threads(compute, threads)
        return lambda: work(1)

    candidates = [Candidate(WORK, in_step.each(alone))]
    candidates += [Candidate(title(*cell), in_step.work(after(*cell)), cell[0], cell[1]) for cell in asked]
    return in_step.time(candidates, "cpu", sustained(policy, len(candidates), SUSTAINED))


def figures_of(make: Maker, part: Part, reading: Reading, asked: Sequence[tuple[str, int]]) -> list[Figure]:
    """Return the seconds of each collective: with the work before it, less the work of the same round.

    One that took no longer than the work alone says nothing, and is left out.
    """
    work, found = reading.timings.get(WORK), []
    for collective, size in asked:
        both = reading.timings.get(title(collective, size))
        if work is None or both is None:
            continue
        seconds = [b - a for a, b in zip(work.raw, both.raw, strict=True)]
        if median(seconds) > 0:
            at = {"collective": collective, "backend": part.backend, "ranks": part.ranks, "bytes": size}
            found.append(make.timed(NAME, at, "s", seconds))
    return found


def run(bench: Bench, part: float) -> list[Figure]:
    """Measure all CPU ranks, and fewer of them."""
    sizes = bench.sizes["after_work"]
    todo = parts(["gloo"], bench.cpu_ranks, bench.sizes["every_number"])
    readings: Sequence[tuple[Part, Reading]] = bench.on(["cpu"] * bench.cpu_ranks, part, task, todo, sizes)
    figures = []
    for each, reading in readings:
        bench.readings.append(reading)
        figures += figures_of(bench.maker(reading), each, reading, cells(sizes))
    return figures
