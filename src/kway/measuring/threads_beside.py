"""Replicas that are threads of one process: what they take beside each other, for their turns, and for a sum."""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from kway.comm.threads import ThreadGroup
from kway.comm.trace import Trace, Untraced
from kway.devices.cpu import threads_for
from kway.launch import threads
from kway.launch.shared_process import SharedProcess
from kway.measuring.bench import Bench, Row
from kway.measuring.collectives import WIDTH
from kway.measuring.figure import Figure, Maker
from kway.measuring.noted import Noted, costs_something, free
from kway.measuring.ranks_beside import compared
from kway.measuring.step_work import ALONE, AT_ONCE, KINDS, LARGE, counts, sustained
from kway.measuring.timer import Candidate, Work
from kway.step.process_wide import drawing, held

NAME, SLOWER = "threads beside each other", "threads beside each other: slowdown"
TURNS, SUM = "turns of threads", "sum of threads"


def replicas(size: int, threads_of_each: int, task: Callable[[ThreadGroup], Any]) -> list[Any]:
    """Call ``task(group)`` in so many threads, each with so many threads of torch; return the results by rank."""
    process = SharedProcess(size, held, drawing)

    def replica(rank: int) -> Any:
        torch.set_num_threads(threads_of_each)
        return task(ThreadGroup(process, rank, size, Untraced(Trace())))

    before = torch.get_num_threads()
    try:
        return threads.run(replica, process)
    finally:
        # The number for threads to come is the process's own.
        torch.set_num_threads(before)


def together(size: int, threads_of_each: int, kind: str) -> Work:
    """Return the work of threads that do ``kind`` side by side from first to last repeat; the slowest counts."""

    def run(count: int) -> float:
        def task(group: ThreadGroup) -> float:
            call = KINDS[kind].make()
            with group.side_by_side():
                call()  # what a thread does for the first time is no part of it
            with group.side_by_side():
                begun = time.perf_counter()
                for _ in range(count):
                    call()
                return time.perf_counter() - begun

        return float(max(replicas(size, threads_of_each, task)))

    return run


class Told(NamedTuple):
    """What one thread tells of a repeat: seconds of its pass and of its sum, and when it was through."""

    work: float
    sum: float
    through: float


def in_steps(size: int, threads_of_each: int, bytes_: int | None, turns: Noted, sums: Noted) -> Work:
    """Return the work of threads that take a pass a step, side by side, with a sum of ``bytes_`` after it.

    ``turns`` notes what a step takes beside pass and sum, ``sums`` what the sum takes: see ``costs``.
    """

    def run(count: int) -> float:
        def task(group: ThreadGroup) -> list[Told]:
            compute, tensor = KINDS[LARGE].make(), torch.zeros((bytes_ or 0) // WIDTH)

            def step() -> Told:
                with group.side_by_side():
                    marks = [time.perf_counter()]
                    compute()
                    marks.append(time.perf_counter())
                    if bytes_ is not None:
                        group.sum_(tensor)
                    marks.append(time.perf_counter())
                return Told(marks[1] - marks[0], marks[2] - marks[1], time.perf_counter())

            # What a thread does for the first time counts for nothing but when it is over.
            return [step() for _ in range(count + 1)]

        steps = list(zip(*replicas(size, threads_of_each, task), strict=True))
        found = [costs(before, step) for before, step in pairwise(steps)]
        turns.note(count, [each for each, _ in found])
        sums.note(count, [each for _, each in found])
        first, last = (max(told.through for told in step) for step in (steps[0], steps[-1]))
        return float(last - first)

    return run


def costs(before: Sequence[Told], step: Sequence[Told]) -> tuple[float, float]:
    """Return the seconds that turns and the sum took in a step, from what threads tell of it and of the one before.

    A step is over when the last thread is through. What is not pass and sum of the slowest thread is turns; a sum takes
    as long as in the thread that comes last, which waits for nobody.
    """
    took = max(told.through for told in step) - max(told.through for told in before)
    return took - max(told.work + told.sum for told in step), min(told.sum for told in step)


def rows(size: int) -> list[Row]:
    """Return a row for each kind of work and way, among so many threads."""
    own = threads_for(size)
    return [
        Row(NAME, {"of": kind, "threads": size, "way": way}, together(1 if way == ALONE else size, own, kind))
        for kind in KINDS
        for way in (ALONE, AT_ONCE)
    ]


def figures_of(
    make: Maker, size: int, turns: Sequence[float], sums: Mapping[int, Sequence[float]]
) -> list[Figure]:
    """Return what turns take, and sums by bytes. What seems to take nothing says nothing, and is left out."""
    asked: list[tuple[str, dict[str, Any], Sequence[float]]] = [(TURNS, {"threads": size}, turns)]
    asked += [(SUM, {"threads": size, "bytes": each}, seconds) for each, seconds in sums.items()]
    return [make.timed(name, at, "s", seconds) for name, at, seconds in asked if costs_something(seconds)]


def run(bench: Bench, part: float) -> list[Figure]:
    """Measure as many threads as there may be CPU ranks, and fewer of them."""
    asked = counts(bench.cpu_ranks, bench.sizes["every_number"])
    figures: list[Figure] = []
    for size in asked:
        own, by_way = part / len(asked), rows(size)
        measured = bench.measure(by_way, "cpu", own / 2, partial(sustained, candidates=len(by_way)))
        figures += measured + compared(bench, measured, NAME, SLOWER, "threads")
        figures += _of_steps(bench, size, own / 2)
    return figures


def _of_steps(bench: Bench, size: int, part: float) -> list[Figure]:
    """Measure turns and sums of so many threads."""
    own, turns, sums = threads_for(size), Noted(), {each: Noted() for each in bench.sizes["sums"]}
    candidates = [Candidate(TURNS, in_steps(size, own, None, turns, Noted()))]
    candidates += [
        Candidate(f"{SUM}: {each}", in_steps(size, own, each, Noted(), noted), SUM, float(each))
        for each, noted in sums.items()
    ]
    reading = bench.time(candidates, "cpu", part, partial(sustained, candidates=len(candidates)))
    timings = reading.timings
    found = {each: noted.of(timings.get(f"{SUM}: {each}")) for each, noted in sums.items()}
    own_turns = turns.of(timings.get(TURNS))
    by_name = {TURNS: own_turns, **{f"{SUM} of {each} bytes": seconds for each, seconds in found.items()}}
    bench.notes += free(f"{size} threads", by_name)
    return figures_of(bench.maker(reading), size, own_turns, found)
