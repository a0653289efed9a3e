"""What a Linux control group leaves of the machine: processor time and memory, versions 1 and 2.

A limit may sit on any group from the process's own up to the root, and a container often sees its own group
as the root. So every group on the way up that can be read is asked, and the smallest limit wins.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

# A version 1 group without a memory limit reads as a number near 2**63.
NO_LIMIT = 1 << 60


class MemoryLimit(NamedTuple):
    """The smallest room for memory, in bytes: the ``limit`` and what is ``available`` below it."""

    limit: int
    available: int


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def _number(text: str) -> int | None:
    try:
        return int(text)
    except ValueError:
        return None


def _groups(root: Path, controller: str) -> Iterator[tuple[int, Path]]:
    """Yield (version, folder) for each group of this process that may limit ``controller``."""
    mount = root / "sys/fs/cgroup"
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        if number == "0" and not names:
            version, tops = 2, [mount]
        elif controller in names.split(","):
            version, tops = 1, [mount / controller, mount / names]
        else:
            continue
        top = next((folder for folder in tops if folder.is_dir()), None)
        if top is None:
            continue
        steps = [part for part in path.split("/") if part and part != ".."]
        for depth in range(len(steps), -1, -1):
            yield version, top.joinpath(*steps[:depth])


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Return how many processors' worth of time this process may use, or ``None`` without a limit."""
    quotas = []
    for version, folder in _groups(root, "cpu"):
        if version == 2:
            share, _, period = _text(folder / "cpu.max").partition(" ")
        else:
            share, period = _text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us")
        part, whole = _number(share), _number(period)
        if part and whole and part > 0 and whole > 0:
            quotas.append(part / whole)
    return min(quotas, default=None)


def process_limit(root: Path = Path("/")) -> int | None:
    """Return how many processes and threads the control groups allow, or ``None`` without a limit."""
    limits = (_number(_text(folder / "pids.max")) for _, folder in _groups(root, "pids"))
    return min((limit for limit in limits if limit is not None), default=None)


def _reclaimable(folder: Path, key: str) -> int:
    """Return the bytes of file cache that the kernel gives back under pressure."""
    for line in _text(folder / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name == key:
            return _number(value) or 0
    return 0


def memory_limit(root: Path = Path("/")) -> MemoryLimit | None:
    """Return the memory that the control groups leave to this process, or ``None`` without a limit."""
    limits, rooms = [], []
    for version, folder in _groups(root, "memory"):
        names = ("memory.max", "memory.current", "inactive_file")
        if version == 1:
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        limit, used = _number(_text(folder / names[0])), _number(_text(folder / names[1]))
        if limit is None or limit >= NO_LIMIT:
            continue
        limits.append(limit)
        rooms.append(max(0, limit - max(0, (used or 0) - _reclaimable(folder, names[2]))))
    return MemoryLimit(min(limits), min(rooms)) if limits else None
