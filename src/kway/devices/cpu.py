"""The processors and the memory of this machine, and how many of them this process may use."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kway.devices.cgroup import cpu_quota, memory_limit
from kway.errors import UsageError

ROOT = Path("/")
MOST_BESIDE_A_GPU = 4
# The names and numbers of glibc's malloc.h.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
KEEP_BYTES, OLD_LIMIT_BYTES = 1 << 28, 1 << 25


def affinity() -> int:
    """Return the number of logical processors that the scheduler may put this process on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def usable_cores(root: Path = ROOT) -> int:
    """Return how many logical processors this process can keep busy, at least 1.

    That is the affinity mask, or the control group's quota of processor time, rounded down, where that is
    lower: more threads than the quota are paused for most of each period.
    """
    quota = cpu_quota(root)
    count = affinity()
    return count if quota is None else max(1, min(count, int(quota)))


def threads_for(ranks: int, environ: Mapping[str, str] | None = None, beside_gpu: bool = False) -> int:
    """Return the number of threads for one of ``ranks`` ranks of this machine.

    ``OMP_NUM_THREADS`` wins where it holds a positive integer (or a list that starts with one); otherwise the
    usable cores are divided evenly, at least 1 each. ``beside_gpu``: the rank computes on a GPU, and more than
    a few threads on its CPU only get in the way of the one that launches kernels (with 64 of them, a step took
    forty times as long). Raises ``UsageError`` for fewer than one rank.
    """
    if ranks < 1:
        raise UsageError(f"{ranks} ranks", "a machine runs at least 1")
    given = (os.environ if environ is None else environ).get("OMP_NUM_THREADS", "")
    first = given.split(",")[0].strip()
    if first.isascii() and first.isdigit() and int(first) > 0:
        return int(first)
    threads = max(1, usable_cores() // ranks)
    return min(threads, MOST_BESIDE_A_GPU) if beside_gpu else threads


def keep_freed_memory() -> bool:
    """Ask the C library to keep the memory that a step frees for the next one; return whether it can.

    By default glibc gives large blocks back to the system and asks for them again, page by page, in every step:
    2,000 page faults and 3 to 5 ms a step of LeNet on two ranks, measured. Other C libraries are left alone.
    """
    import ctypes

    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    # Older versions take at most 32 MiB here. Where neither works, the other threshold must stay as it is too:
    # setting it alone would fix this one at its smallest.
    if not any(mallopt(M_MMAP_THRESHOLD, limit) == 1 for limit in (KEEP_BYTES, OLD_LIMIT_BYTES)):
        return False
    return bool(mallopt(M_TRIM_THRESHOLD, KEEP_BYTES) == 1)


def model(root: Path = ROOT) -> str:
    """Return what the processor is called, its architecture where the system has no name for it."""
    try:
        with (root / "proc/cpuinfo").open() as lines:
            for line in lines:
                key, _, value = line.partition(":")
                if key.strip() in ("model name", "Model", "cpu model") and value.strip():
                    return value.strip()
    except OSError:
        pass
    return os.uname().machine


def _physical_cores(root: Path) -> int:
    """Count the groups of logical processors that share one core, over the whole machine."""
    groups = set()
    for file in (root / "sys/devices/system/cpu").glob("cpu[0-9]*/topology/thread_siblings_list"):
        try:
            groups.add(file.read_text().strip())
        except OSError:
            continue
    return len(groups) or os.cpu_count() or 1


def _system_memory(root: Path) -> tuple[int, int]:
    """Return (total, available) bytes of the machine."""
    found = {}
    try:
        with (root / "proc/meminfo").open() as lines:
            for line in lines:
                key, _, value = line.partition(":")
                if key in ("MemTotal", "MemAvailable"):
                    found[key] = int(value.split()[0]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    if "MemTotal" in found:
        return found["MemTotal"], found.get("MemAvailable", found["MemTotal"])
    # Not every system counts its free pages in sysconf (macOS does not): then all memory counts as available.
    names = os.sysconf_names
    page = os.sysconf("SC_PAGE_SIZE")
    total = os.sysconf("SC_PHYS_PAGES") * page if "SC_PHYS_PAGES" in names else 0
    free = os.sysconf("SC_AVPHYS_PAGES") * page if "SC_AVPHYS_PAGES" in names else total
    return total, free


def memory(root: Path = ROOT) -> tuple[int, int]:
    """Return (total, available) bytes of memory; a control group's limit counts as the total."""
    total, available = _system_memory(root)
    limit = memory_limit(root)
    if limit is not None:
        total, available = min(total, limit.limit), min(available, limit.available)
    return total, available


def resident(root: Path = ROOT) -> tuple[int, int] | None:
    """Return (now, at most so far) bytes of this process in memory, where the system says so."""
    found = {}
    try:
        with (root / "proc/self/status").open() as lines:
            for line in lines:
                key, _, value = line.partition(":")
                if key in ("VmRSS", "VmHWM"):
                    found[key] = int(value.split()[0]) * 1024
    except (OSError, ValueError, IndexError):
        return None
    return (found["VmRSS"], found["VmHWM"]) if len(found) == 2 else None


def describe(root: Path = ROOT) -> dict[str, Any]:
    """Describe processors and memory; ``root`` is where ``/proc`` and ``/sys`` are found.

    Keys: ``model``, ``cores`` (physical, whole machine), ``logical`` (whole machine), ``affinity``, ``quota``
    (processors' worth of time, or ``None``), ``usable`` (see ``usable_cores``), ``memory_total`` and
    ``memory_available`` in bytes (a control group's limit counts as the total).
    """
    total, available = memory(root)
    return {
        "model": model(root),
        "cores": _physical_cores(root),
        "logical": os.cpu_count() or 1,
        "affinity": affinity(),
        "quota": cpu_quota(root),
        "usable": usable_cores(root),
        "memory_total": total,
        "memory_available": available,
    }
