"""Whether other programs keep the processors busy that something is about to be timed on."""

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

STAT = Path("/proc/stat")
# What is left for this process may be this part of what it could use, before a line says so.
ENOUGH = 0.75
_LOOK_S = 0.2
# In a second, in what Linux tells (proc_stat(5)).
_TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


def taken(
    usable: int, file: Path = STAT, sleep: Callable[[float], None] = time.sleep, look_s: float = _LOOK_S
) -> str:
    """Return what others keep busy, like ``1.8 of 2 processors``; ``""``: enough of ``usable`` is left.

    Looks for ``look_s`` seconds, while this process does nothing. Where Linux does not tell, nothing is said.
    """
    before = _times(file)
    sleep(look_s)
    after = _times(file)
    if before is None or after is None or after[1] <= before[1]:
        return ""
    processors = after[2]
    busy = processors * (after[0] - before[0]) / (after[1] - before[1])
    if processors - busy >= ENOUGH * min(usable, processors):
        return ""
    return f"{busy:.1f} of {processors} processors"


@dataclass(frozen=True)
class Moment:
    """What processors and this process had worked by then. ``own``: seconds of its own, and of children that ended."""

    worked: int
    all: int
    processors: int
    own: float

    def may_be_short(self, usable: int, now: "Moment") -> bool:
        """Whether others may have left less than enough of ``usable`` since. Cheap; ``taken`` says it for certain."""
        if now.all <= self.all:
            return False
        seconds = (now.all - self.all) / _TICKS / now.processors
        busy = (now.worked - self.worked) / _TICKS - (now.own - self.own)
        return now.processors - busy / seconds < ENOUGH * min(usable, now.processors)


def moment(file: Path = STAT) -> Moment | None:
    """Return what was worked by now; ``None`` where Linux does not tell."""
    found, own = _times(file), os.times()
    return None if found is None else Moment(*found, sum(own[:4]))


def said(others: str) -> list[str]:
    """Return a line for the user before something is timed beside ``others`` (of ``taken``), if they are."""
    if not others:
        return []
    return [
        f"other programs keep {others} busy: what is timed now may be far from what it takes without them"
    ]


def spins(environ: Mapping[str, str] | None = None) -> bool:
    """Return whether threads of OpenMP wait for each other by spinning, which costs most beside other programs."""
    return (os.environ if environ is None else environ).get("OMP_WAIT_POLICY", "").lower() != "passive"


def _times(file: Path) -> tuple[int, int, int] | None:
    """Return ticks in which processors worked, all ticks, and the number of processors (proc_stat(5))."""
    try:
        lines = [line.split() for line in file.read_text().splitlines() if line.startswith("cpu")]
        # user, nice, system, idle, iowait, irq, softirq, steal; guests are counted in user already.
        ticks = [int(field) for field in lines[0][1:9]]
    except (OSError, ValueError, IndexError):
        return None
    if len(ticks) < 5 or len(lines) < 2:
        return None
    return sum(ticks) - ticks[3] - ticks[4], sum(ticks), len(lines) - 1
