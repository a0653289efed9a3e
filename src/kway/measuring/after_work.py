"""Collectives of CPU ranks that follow computing, as those of a step do: caches are cold, and who is first waits."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from kway.comm.group import Group
from kway.devices.cpu import threads_for
from kway.measuring.bench import Bench
from kway.measuring.collective_ranks import Part, in_turn, parts, title
from kway.measuring.collectives import ALL_REDUCE, COLLECTIVES, ORDERED, Buffers, elements_of
from kway.measuring.figure import Figure, Maker
from kway.measuring.in_step import InStep
from kway.measuring.noted import Noted, costs_something, free
from kway.measuring.step_work import KINDS, LARGE, sustained, with_threads
from kway.measuring.timer import Candidate, Policy, Reading
from kway.measuring.work import Call

NAME = "collective after work"
# How many times as long as others a sample is: it has ten collectives or more, whose waits differ.
SUSTAINED = 25
# Those that steps are made of.
ASKED = (ALL_REDUCE, "all-gather", ORDERED)
Told = tuple[float, float, float]
# What ranks have noted, by the names of candidates.
ByName = dict[str, Noted]


def cells(sizes: Mapping[str, Sequence[int]]) -> list[tuple[str, int]]:
    """List the collectives and sizes, those first that every step has."""
    return [(collective, size) for collective in ASKED for size in sizes.get(collective, ())]


def task(
    context: Any, todo: Sequence[Part], sizes: Mapping[str, Sequence[int]], policy: Policy, asked_at: float
) -> list[tuple[Part, Reading, ByName]]:
    """Time the parts ``todo`` on this rank, ``sizes`` by collective; return what each that it is in has told."""
    turns = in_turn(context.world, todo, policy, asked_at)
    return [(part, *_timed(in_step, group, cells(sizes), allowed)) for part, in_step, group, allowed in turns]


def _timed(
    in_step: InStep, group: Group, asked: Sequence[tuple[str, int]], policy: Policy
) -> tuple[Reading, ByName]:
    largest = elements_of(max(size for _, size in asked), group.size)
    buffers = Buffers(group, *(torch.zeros(largest) for _ in range(2)))
    noted: ByName = {title(*cell): Noted() for cell in asked}

    def after(collective: str, size: int) -> Callable[[], Callable[[], Told]]:
        make, _ = COLLECTIVES[collective]
        return lambda: between_passes(make(buffers, elements_of(size, group.size)), threads_for(group.size))

    candidates = [
        Candidate(
            title(*cell), in_step.repeats(after(*cell), cost, noted[title(*cell)]), cell[0], float(cell[1])
        )
        for cell in asked
    ]
    return in_step.time(candidates, "cpu", sustained(policy, len(candidates), SUSTAINED)), noted


def between_passes(collective: Call, threads: int) -> Callable[[], Told]:
    """Return what does two passes and a collective, and tells the seconds of each pass and, below 0, of the collective.

    The first pass follows a collective of before: it finds caches cold, on a processor that was idle; the second one
    follows a pass.
    """
    work = with_threads(KINDS[LARGE].make, threads)

    def repeat() -> Told:
        cold, warm = work(1), work(1)
        begun = time.perf_counter()
        collective()
        return cold, warm, begun - time.perf_counter()

    return repeat


def cost(cold: float, warm: float, least: float) -> float:
    """Return what a collective costs between passes, from the largest of each number over the ranks.

    It takes as long as on the rank that comes last, which waits for nobody; and a pass after it takes longer than one
    that follows a pass, on the slowest rank of each. Both are of the same moment, so that what else the machine does
    is in both passes.
    """
    return cold - warm - least


def figures_of(
    make: Maker, part: Part, reading: Reading, noted: ByName, asked: Sequence[tuple[str, int]]
) -> list[Figure]:
    """Return the seconds of each collective. One that seems to cost nothing says nothing, and is left out."""
    found = []
    for collective, size in asked:
        name = title(collective, size)
        seconds = noted[name].of(reading.timings.get(name))
        if costs_something(seconds):
            at = {"collective": collective, "backend": part.backend, "ranks": part.ranks, "bytes": size}
            found.append(make.timed(NAME, at, "s", seconds))
    return found


def run(bench: Bench, part: float) -> list[Figure]:
    """Measure all CPU ranks, and fewer of them."""
    sizes = bench.sizes["after_work"]
    todo = parts(["gloo"], bench.cpu_ranks, bench.sizes["every_number"])
    told: Sequence[tuple[Part, Reading, ByName]] = bench.on(
        ["cpu"] * bench.cpu_ranks, part, task, todo, sizes
    )
    figures = []
    for each, reading, noted in told:
        bench.readings.append(reading)
        figures += figures_of(bench.maker(reading), each, reading, noted, cells(sizes))
        told_of = {name: own.of(reading.timings.get(name)) for name, own in noted.items()}
        bench.notes += free(f"{NAME}, {each.backend} on {each.ranks} CPU ranks", told_of)
    return figures
