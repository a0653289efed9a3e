"""Replicas that are threads of one process: what they take beside each other, for their turns, and for a sum."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from statistics import median

import torch

from kway.comm.threads import ThreadGroup
from kway.comm.trace import Trace, Untraced
from kway.devices.cpu import threads_for
from kway.launch import threads
from kway.launch.shared_process import SharedProcess
from kway.measuring.bench import Bench, Row
from kway.measuring.collectives import WIDTH
from kway.measuring.figure import Figure, Maker
from kway.measuring.ranks_beside import compared
from kway.measuring.step_work import ALONE, AT_ONCE, KINDS, LARGE, counts, sustained
from kway.measuring.timer import Candidate, Timing, Work
from kway.measuring.work import Call
from kway.step.process_wide import drawing, held

NAME, SLOWER = "threads beside each other", "threads beside each other: slowdown"
TURNS, SUM = "turns of threads", "sum of threads"
# What others are taken off: each repeat of the work as long as in its slowest thread, and the same in turns.
WORK, IN_TURNS = "work alone", "work in turns"

# Returns what a thread of the group repeats.
Body = Callable[[ThreadGroup], Call]


def together(size: int, count_of_torch: int, body: Body, spread: bool, each: bool = False) -> Work:
    """Return the work of ``size`` threads that begin at once, each with so many threads of torch.

    ``spread``: they go side by side from the first repeat to the last; else the body says when. As long as the slowest
    thread takes; with ``each`` every repeat counts as if they met after it, as long as in its slowest thread.
    """

    def run(count: int) -> float:
        process = SharedProcess(size, held, drawing)

        def replica(rank: int) -> list[float]:
            torch.set_num_threads(count_of_torch)
            group = ThreadGroup(process, rank, size, Untraced(Trace()))
            repeat = body(group)
            with group.side_by_side() if spread else nullcontext():
                repeat()  # what a thread does for the first time is no part of it
            group.barrier()
            ends = [time.perf_counter()]
            with group.side_by_side() if spread else nullcontext():
                for _ in range(count):
                    repeat()
                    ends.append(time.perf_counter())
            return [after - before for before, after in pairwise(ends)]

        before = torch.get_num_threads()
        try:
            took = threads.run(replica, process)
        finally:
            # The number for threads to come is the process's own.
            torch.set_num_threads(before)
        return sum(max(repeat) for repeat in zip(*took, strict=True)) if each else max(map(sum, took))

    return run


def computing(kind: str) -> Body:
    """Return the body of threads that compute."""
    return lambda group: KINDS[kind].make()


def step(size: int | None = None) -> Body:
    """Return the body of threads that compute side by side and take turns before and after, as in a step.

    ``size``: with a sum of so many bytes after computing.
    """

    def body(group: ThreadGroup) -> Call:
        compute, tensor = KINDS[LARGE].make(), torch.zeros((size or 0) // WIDTH)

        def taken() -> None:
            with group.side_by_side():
                compute()
                if size is not None:
                    group.sum_(tensor)

        return taken

    return body


def rows(size: int) -> list[Row]:
    """Return a row for each kind of work and way, among so many threads."""
    own = threads_for(size)
    return [
        Row(
            NAME,
            {"of": kind, "threads": size, "way": way},
            together(1 if way == ALONE else size, own, computing(kind), spread=True),
        )
        for kind in KINDS
        for way in (ALONE, AT_ONCE)
    ]


def in_steps(size: int, sizes: Sequence[int]) -> list[Candidate]:
    """Return what is done by so many threads as in a step: work, the same in turns, and with a sum of each size."""
    own = threads_for(size)
    return [
        Candidate(WORK, together(size, own, computing(LARGE), spread=True, each=True)),
        Candidate(IN_TURNS, together(size, own, step(), spread=False)),
        *(Candidate(f"{SUM}: {each}", together(size, own, step(each), spread=False)) for each in sizes),
    ]


def figures_of(make: Maker, size: int, timings: Mapping[str, Timing], sizes: Sequence[int]) -> list[Figure]:
    """Return what turns and sums add to work, of the same round each. What adds nothing is left out."""
    asked = [(TURNS, {"threads": size}, WORK, IN_TURNS)]
    asked += [(SUM, {"threads": size, "bytes": each}, IN_TURNS, f"{SUM}: {each}") for each in sizes]
    found = []
    for name, at, without, within in asked:
        if without in timings and within in timings:
            pairs = zip(timings[without].raw, timings[within].raw, strict=True)
            seconds = [more - less for less, more in pairs]
            if median(seconds) > 0:
                found.append(make.timed(name, dict(at), "s", seconds))
    return found


def run(bench: Bench, part: float) -> list[Figure]:
    """Measure as many threads as there may be CPU ranks, and fewer of them."""
    figures = []
    sizes, asked = bench.sizes["sums"], counts(bench.cpu_ranks, bench.sizes["every_number"])
    usual = bench.policy
    for size in asked:
        by_way, steps = rows(size), in_steps(size, sizes)
        own = part / len(asked)
        shares = own * len(by_way) / (len(by_way) + len(steps))
        bench.policy = sustained(replace(usual, seconds=bench.share("cpu", shares)), len(by_way))
        measured = bench.measure(by_way, "cpu", shares)
        figures += measured + compared(bench, measured, NAME, SLOWER, "threads")
        bench.policy = sustained(replace(usual, seconds=bench.share("cpu", own - shares)), len(steps))
        reading = bench.time(steps, "cpu", own - shares)
        figures += figures_of(bench.maker(reading), size, reading.timings, sizes)
    bench.policy = usual
    return figures
