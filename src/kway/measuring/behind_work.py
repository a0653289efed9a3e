"""Collectives of GPUs that are queued behind other work, as those of recorded steps are: no host is waited for.

One after the other from the host, small ones take as long as their launches.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from kway.comm.group import Group
from kway.measuring.after_work import NAME, cells
from kway.measuring.bench import Bench
from kway.measuring.collective_ranks import Part, in_turn, parts, title
from kway.measuring.collectives import COLLECTIVES, Buffers, elements_of
from kway.measuring.figure import Figure
from kway.measuring.in_step import InStep
from kway.measuring.timer import Candidate, Policy, Reading, Work
from kway.measuring.work import Call, launched, on_stream, waiter

# Collectives that are queued at once, and how many times as long as their launches the work before them takes: that has
# to be launched as well, and a rank may be slower to launch than it was when that was timed.
BURST, LONGER = 50, 4.0
# Elements of what keeps a GPU busy meanwhile, and how often it is done, in each of how many readings, to see how long
# it takes.
BUSY, TIMED, READINGS = 1 << 24, 20, 3


def task(
    context: Any, todo: Sequence[Part], sizes: Mapping[str, Sequence[int]], policy: Policy, asked_at: float
) -> list[tuple[Part, Reading]]:
    """Time the parts ``todo`` on this rank, ``sizes`` by collective; return those that it is in."""
    device, asked = context.world.device, cells(sizes)
    turns = in_turn(context.world, todo, policy, asked_at)
    return [(part, _timed(in_step, group, device, asked, allowed)) for part, in_step, group, allowed in turns]


def _timed(
    in_step: InStep, group: Group, device: str, asked: Sequence[tuple[str, int]], policy: Policy
) -> Reading:
    largest = elements_of(max(size for _, size in asked), group.size)
    buffers = Buffers(group, *(torch.zeros(largest, device=device) for _ in range(2)))
    busy = torch.zeros(BUSY, device=device)

    def work(collective: str, size: int) -> Work:
        make, _ = COLLECTIVES[collective]
        call = make(buffers, elements_of(size, group.size))
        return in_step.work(lambda: queued(call, lambda: busy.add_(1.0), device))

    candidates = [Candidate(title(*cell), work(*cell), cell[0], float(cell[1])) for cell in asked]
    return in_step.time(candidates, device, policy)


def queued(call: Call, busy: Call, device: str) -> Work:
    """Make work of a collective that waits in the queue of a GPU until that has done ``busy`` for a while.

    By the GPU's own clock, from when the ranks have met in a first one.
    """
    place = torch.device(device)
    times: list[int] = []

    def before() -> None:
        for _ in range(times[0]):
            busy()
        call()

    burst = on_stream(call, place, before)

    def run(count: int) -> float:
        if not times:
            call()  # connects the ranks
            # The shortest of a few: the first one loads the kernel, and what is thought to take too long is done too
            # seldom to outlast the launches.
            one_s = min(on_stream(busy, place)(TIMED) for _ in range(READINGS)) / TIMED
            times.append(math.ceil(LONGER * launched(call, waiter(place))(BURST) / one_s))
        return sum(burst(min(BURST, count - begun)) for begun in range(0, count, BURST))

    return run


def run(bench: Bench, part: float) -> list[Figure]:
    """Measure all GPUs, and fewer of them."""
    sizes = bench.sizes["behind_work"]
    todo = parts(["nccl"], len(bench.gpus), bench.sizes["every_number"])
    told: Sequence[tuple[Part, Reading]] = bench.on(list(bench.gpus), part, task, todo, sizes)
    figures = []
    for each, reading in told:
        bench.readings.append(reading)
        make = bench.maker(reading)
        for collective, size in cells(sizes):
            timing = reading.timings.get(title(collective, size))
            if timing is not None:
                at = {"collective": collective, "backend": each.backend, "ranks": each.ranks, "bytes": size}
                figures.append(make.timed(NAME, at, "s", timing.raw))
    return figures
