"""What the doctor makes of the limits of a process: open files, locked memory, processes and threads."""

import resource
from collections.abc import Callable

from kway.devices.checks import FAIL, WARN, Check, good
from kway.units import bytes_text

# Open files of a process with torch, and of the one that started the ranks for each of them.
_FILES_BESIDE, _FILES_A_RANK = 40, 3
_ENOUGH_FILES = 1024
# Threads of a rank on a large machine, with those of its loader workers.
_TASKS_A_RANK = 64
_ENOUGH_TASKS = 2048
_UNLIMITED = resource.RLIM_INFINITY

Limit = Callable[[int], tuple[int, int]]


def open_files(ranks: int, limit: Limit = resource.getrlimit) -> Check:
    """Judge how many files a process may have open (``ulimit -n``), for as many ranks as there are devices."""
    soft, hard = limit(resource.RLIMIT_NOFILE)
    found = f"a process may have {_shown(soft)} files open"
    need = _FILES_BESIDE + _FILES_A_RANK * ranks
    wanted = max(_ENOUGH_FILES, 2 * need)
    do = f"ulimit -n {wanted}"
    if hard != _UNLIMITED and hard < wanted:
        do += f", for which the hard limit of {hard} must be raised (limits.conf; docker run --ulimit nofile=65536)"
    if soft == _UNLIMITED or soft >= max(_ENOUGH_FILES, need):
        return good("open files", found)
    if soft < need:
        return Check("open files", FAIL, f"{found}; the start of {ranks} ranks takes about {need}", do)
    return Check("open files", WARN, f"{found}, which ranks with loader workers may reach", do)


def locked_memory(has_infiniband: bool, limit: Limit = resource.getrlimit) -> Check:
    """Judge how much memory may be locked (``ulimit -l``): InfiniBand registers its buffers that way."""
    soft, _ = limit(resource.RLIMIT_MEMLOCK)
    found = "no limit" if soft == _UNLIMITED else f"{bytes_text(soft)} at most"
    if soft == _UNLIMITED or not has_infiniband:
        return good("locked memory", found if soft == _UNLIMITED else f"{found}; only InfiniBand needs more")
    do = "ulimit -l unlimited (limits.conf; docker run --ulimit memlock=-1), or NCCL finds no InfiniBand"
    return Check("locked memory", WARN, f"{found}, with InfiniBand", do)


def tasks(ranks: int, group: int | None, limit: Limit = resource.getrlimit) -> Check:
    """Judge how many processes and threads there may be (``ulimit -u``, and ``group``: the control group's limit)."""
    soft, _ = limit(resource.RLIMIT_NPROC)
    found = [] if soft == _UNLIMITED else [(soft, "the user's limit", f"ulimit -u {_ENOUGH_TASKS}")]
    found += [] if group is None else [(group, "the control group's limit", "docker run --pids-limit=-1")]
    if not found:
        return good("processes", "no limit")
    least, whose, do = min(found)
    text = f"{least:,} processes and threads: {whose}"
    need = _TASKS_A_RANK * ranks
    if least >= max(need, _ENOUGH_TASKS):
        return good("processes", text)
    return Check(
        "processes", FAIL if least < _TASKS_A_RANK else WARN, f"{text}; {ranks} ranks take {need}", do
    )


def _shown(limit: int) -> str:
    return "any number of" if limit == _UNLIMITED else f"{limit:,}"
