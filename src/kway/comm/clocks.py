"""How clocks of ranks stand to each other: one clock on one machine, else bounded by moments that all ranks share."""

import os
import platform
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kway.comm.group import Group

ROUNDS = 20


@dataclass(frozen=True)
class Offset:
    """How far a rank's monotonic clock is ahead of rank 0's, ``seconds``, to within ``within_s``."""

    seconds: float = 0.0
    within_s: float = 0.0


def this_clock() -> str:
    """Return what names the monotonic clock of this process: equal texts mean the same clock.

    All processes since a start of a machine share it, but for those in a time namespace of their own.
    """
    found = [platform.node()]
    with suppress(OSError):
        found.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    with suppress(OSError):
        found.append(str(Path("/proc/self/ns/time").readlink()))
    return " ".join(found) if len(found) > 1 else f"{found[0]} {os.getpid()}"


def offsets(
    group: Group, clock: str | None = None, now: Callable[[], float] = time.monotonic
) -> list[Offset]:
    """Return the offset of each rank's clock, by rank. A collective, several times where there are several clocks.

    In each round all ranks come to a gather, which none of them leaves before all have come. So what a rank read when
    it left is later than what any other read when it came, and both differences bound the offset; the closest bounds
    of all rounds count, and the middle between them. ``clock``: what names this process's own.
    """
    clocks: list[str] = group.objects(clock or this_clock())
    if len(set(clocks)) == 1:
        return [Offset()] * group.size
    rounds: list[tuple[float, float]] = []
    for _ in range(ROUNDS):
        came = now()
        group.objects(None)
        rounds.append((came, now()))
    times: list[list[tuple[float, float]]] = group.objects(rounds)
    found = {clocks[0]: Offset()}
    for name in clocks:
        if name not in found:
            own = [times[rank] for rank in range(group.size) if clocks[rank] == name]
            found[name] = _between(times[0], own)
    return [found[name] for name in clocks]


def _between(first: Sequence[tuple[float, float]], others: Sequence[Sequence[tuple[float, float]]]) -> Offset:
    """Return the offset of the one clock of ``others``, which took the same rounds as ``first``."""
    pairs = [(a, b) for other in others for a, b in zip(first, other, strict=True)]
    least = max(came - left for (_, left), (came, _) in pairs)
    most = min(left - came for (came, _), (_, left) in pairs)
    return Offset((least + most) / 2, (most - least) / 2)
