"""The processors of this machine in parts, for processes that are not to get in each other's way."""

import os
from collections.abc import Sequence
from itertools import chain, pairwise
from pathlib import Path

from kway.devices.cpu import ROOT


def parts(count: int, allowed: Sequence[int] | None = None, root: Path = ROOT) -> list[list[int]]:
    """Cut the logical processors that this process may run on into ``count`` parts of about equal size.

    Processors that share a core stay together where there are cores enough. Where there are more parts than processors,
    several parts are the same one. ``allowed``: in place of this process's. Empty parts where the system does not say.
    """
    if allowed is None:
        if not hasattr(os, "sched_getaffinity"):
            return [[] for _ in range(count)]
        allowed = sorted(os.sched_getaffinity(0))
    units = _cores(allowed, root)
    if len(units) < count:
        units = [[processor] for unit in units for processor in unit]
    if len(units) < count:
        return [units[place % len(units)] for place in range(count)]
    cuts = [place * len(units) // count for place in range(count + 1)]
    return [list(chain.from_iterable(units[start:end])) for start, end in pairwise(cuts)]


def _cores(allowed: Sequence[int], root: Path) -> list[list[int]]:
    """Return the processors that share a core, core by core; each alone where that is not known."""
    found: dict[str, list[int]] = {}
    for processor in allowed:
        file = root / f"sys/devices/system/cpu/cpu{processor}/topology/thread_siblings_list"
        try:
            core = file.read_text().strip()
        except OSError:
            core = f"of {processor}"
        found.setdefault(core, []).append(processor)
    return list(found.values())
