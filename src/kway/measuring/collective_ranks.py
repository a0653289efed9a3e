"""What a rank does to time collectives: over all ranks and over fewer of them, through each back end."""

import gc
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from kway.comm.group import Group
from kway.comm.trace import Trace, Untraced
from kway.devices import cpu
from kway.measuring.collectives import COLLECTIVES, Buffers, elements_of
from kway.measuring.in_step import InStep, Remaining, control
from kway.measuring.timer import Candidate, Policy, Reading, Work
from kway.measuring.work import Call, on_stream, waited, waiter

# Copies of the largest size that a rank may need: two buffers, and what the ordered sum makes.
COPIES = 6
# Bytes that could be sent in the time that Gloo takes to begin: what a few cost tells of many only with these.
BEGIN = 1 << 18


@dataclass(frozen=True)
class Part:
    """One set of candidates: all collectives and sizes among the first ``ranks`` ranks, through ``backend``."""

    backend: str
    ranks: int


def parts(backends: Collection[str], size: int, every: bool = True) -> list[Part]:
    """List the sets to time on ``size`` ranks: all ranks through each back end first, then 2, 3, ... of them.

    Not ``every`` number: 2, 4, 8, ... of them through the first back end.
    """
    fewer = range(2, size) if every else (1 << k for k in range(1, size.bit_length()) if 1 << k < size)
    through = [*backends] if every else [*backends][:1]
    return [Part(each, size) for each in backends] + [
        Part(each, ranks) for ranks in fewer for each in through
    ]


def title(collective: str, size: int) -> str:
    """Name a candidate of a set."""
    return f"{collective} of {size} bytes"


def task(
    context: Any, todo: Sequence[Part], sizes: Mapping[str, Sequence[int]], policy: Policy, asked_at: float
) -> list[tuple[Part, Reading]]:
    """Time the parts ``todo`` on this rank, with ``sizes`` by back end, smaller ones first.

    Returns the reading of each part that this rank is in.
    """
    world = context.world
    groups = groups_of(world, todo)
    everyone = control(world, world.size)
    assert everyone is not None
    room = min(everyone.objects(_room(world)))
    remaining = Remaining(InStep(everyone), policy, asked_at)
    found = []
    for place, part in enumerate(todo):
        measured, controlled = groups[part]
        # Most for all ranks, which are those that a run will use.
        weights = [len(todo) if each.ranks == world.size else 1 for each in todo[place:]]
        # Ranks that are in no smaller group wait here: they would disturb it.
        allowed = remaining.part(weights[0], sum(weights))
        fits = [size for size in sizes[part.backend] if size <= room] or list(sizes[part.backend][:1])
        if measured is not None and controlled is not None:
            found.append(
                (part, _timed(InStep(controlled), measured, world.device, part.backend, fits, allowed))
            )
        remaining.meet()
        gc.collect()
        if world.device != "cpu":
            torch.cuda.empty_cache()
    return found


def in_turn(
    world: Any, todo: Sequence[Part], policy: Policy, asked_at: float
) -> Iterator[tuple[Part, InStep, Group, Policy]]:
    """Yield each part that this rank is in, what keeps its ranks in step, its group, and how it may be timed.

    All parts get equal shares of the budget (see ``Remaining``). All ranks go through all of ``todo``.
    """
    groups = groups_of(world, todo)
    everyone = control(world, world.size)
    assert everyone is not None
    remaining = Remaining(InStep(everyone), policy, asked_at)
    for place, part in enumerate(todo):
        measured, controlled = groups[part]
        allowed = remaining.part(1, len(todo) - place)
        if measured is not None and controlled is not None:
            yield part, InStep(controlled), measured, allowed
        # Ranks that are in no smaller group wait here: they would disturb it.
        remaining.meet()


def groups_of(world: Any, todo: Sequence[Part]) -> dict[Part, tuple[Group | None, Group | None]]:
    """Make the groups of all parts, each with the one over which its ranks keep in step. A collective of all ranks."""
    made: dict[Part, tuple[Group | None, Group | None]] = {}
    for part in todo:
        whole = part.ranks == world.size
        if part.backend == world.backend and whole:
            handle = None
        else:
            handle = dist.new_group(list(range(part.ranks)), backend=part.backend)
        inside = world.rank < part.ranks
        measured = Group(world.rank, part.ranks, handle, trace=Untraced(Trace())) if inside else None
        made[part] = measured, control(world, part.ranks, whole)
    return made


def _room(world: Any) -> int:
    """Return the largest size for which a rank has memory; CPU ranks share one, of which half is left for others."""
    if world.device == "cpu":
        return cpu.memory()[1] // (2 * COPIES * int(world.size))
    return int(torch.cuda.mem_get_info(world.device)[0]) // (COPIES + 1)


def _timed(
    in_step: InStep, group: Group, device: str, backend: str, sizes: Sequence[int], policy: Policy
) -> Reading:
    largest = elements_of(max(sizes), group.size)
    held = [torch.zeros(largest, dtype=torch.float32, device=device) for _ in range(2)]
    buffers = Buffers(group, *held)
    one = torch.zeros(1, device=device)

    def level() -> None:
        dist.all_reduce(one, group=group.handle)

    def work(collective: str, size: int) -> Work:
        make, _ = COLLECTIVES[collective]
        elements = elements_of(size, group.size)
        return in_step.work(lambda: _clocked(make(buffers, elements), device, backend), level)

    level()  # connects the ranks, which is no part of what a candidate takes
    return in_step.time(
        [
            Candidate(title(collective, size), work(collective, size), collective, float(BEGIN + size))
            for size in sizes
            for collective in COLLECTIVES
        ],
        # What Gloo does, the CPU does.
        "cpu" if backend == "gloo" else device,
        policy,
    )


def _clocked(call: Call, device: str, backend: str) -> Work:
    """Time what NCCL does by the GPU's events; in what Gloo does the CPU takes part, and its clock counts."""
    if backend == "nccl":
        return on_stream(call, torch.device(device))
    return waited(call, waiter(device))
