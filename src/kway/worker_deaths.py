"""How loader workers end before their time, in words: which one, of which rank, by what, and what helps."""

import shutil
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kway.errors import KwayError

_SHARED = Path("/dev/shm")
_LARGER = "make it larger (docker run --shm-size=8g, or --ipc=host), or use fewer workers or smaller batches"
_SIGNS = ("unable to allocate shared memory", "unable to resize file </torch_", "unable to mmap", "Bus error")
_HINTS: dict[int, tuple[str, str]] = {
    signal.SIGKILL: ("often: the machine ran out of memory", "use fewer workers, or keep less in each"),
    signal.SIGSEGV: ("its native code read memory that is not there", "look for what the data set calls"),
}


def shared_memory() -> str:
    """Say how much shared memory there is for what workers send, and how much of it is free."""
    try:
        usage = shutil.disk_usage(_SHARED)
    except OSError:
        return f"{_SHARED} is not there"
    return f"{_SHARED} holds {usage.total >> 20} MiB, of which {usage.free >> 20} MiB are free"


def too_little_shared_memory(text: str) -> bool:
    """Whether the text of an error, torch's own, says that shared memory could not be had."""
    return any(sign in text for sign in _SIGNS)


def no_room(where: str) -> KwayError:
    """Make the error for an answer that found no room in shared memory. ``where``: worker and rank."""
    return KwayError(f"{where} found no room for a batch in shared memory", shared_memory(), _LARGER)


def death(workers: Iterable[Any], rank: int) -> KwayError | None:
    """Return the error for the first of ``workers`` (processes of multiprocessing) that is dead; ``None``: all live.

    One that a signal killed comes before others: they may only follow from it.
    """
    dead = [(number, worker) for number, worker in enumerate(workers) if not worker.is_alive()]
    if not dead:
        return None
    number, worker = min(dead, key=lambda each: ((each[1].exitcode or 0) >= 0, each[0]))
    who = f"loader worker {number} of rank {rank} (process {worker.pid})"
    code = worker.exitcode or 0
    if code >= 0:
        return KwayError(
            f"{who} left with exit code {code}",
            "workers stay until their rank is done",
            "look for sys.exit and os._exit in the data set",
        )
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    got = f"{who} was killed by {name}"
    if -code == signal.SIGBUS:
        return KwayError(
            got, f"a bus error is what too little shared memory looks like; {shared_memory()}", _LARGER
        )
    return KwayError(got, *_HINTS.get(-code, ("", "")))
