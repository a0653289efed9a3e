"""Every process that ranks started, wherever it went, and its end.

A process group does not hold what called ``setsid``, and a tree of parents loses what was orphaned. So each rank
carries a mark in its environment, which all that it starts inherits: on Linux ``/proc`` shows it. Members are what
carries the mark, what is in a rank's process group, and what descends from either. Out of reach is only what did
all of this: left the group, cleared its environment, and outlived the process that started it; and what runs as
another user. Without ``/proc`` only the process groups are known.

The guard runs this file in a bare interpreter: it imports nothing that is slow.
"""

import contextlib
import os
import signal
import time
from collections.abc import Iterable, Mapping

MARK = "KWAY_FAMILY"
_LOOK_AGAIN_S = 0.005
_GIVE_UP_S = 5.0
_TIDY_S = 2.0
# These remove what a killed process left in shared memory (semaphores of multiprocessing, tensors of torch), and
# end by themselves when all processes that they serve are gone.
_TIDIERS = (b"from multiprocessing.resource_tracker import main", b"torch_shm_manager")


def new_mark() -> str:
    """Make the mark of a job: the ranks' own marks begin with it."""
    return f"{os.urandom(8).hex()}."


def marked(environment: Mapping[str, str], mark: str) -> dict[str, str]:
    """Add ``mark`` to an environment; ranks that were started inside a rank carry both marks."""
    return {**environment, MARK: f"{environment.get(MARK, '')}{mark};"}


def own_family() -> "Family":
    """Return the family of this process, which is a rank."""
    carried = os.environ.get(MARK, "").split(";")[:-1]
    return Family([f"{mark};" for mark in carried[-1:]], [os.getpgrp()])


class Family:
    """The processes that carry one of ``marks`` or are in one of the process ``groups``, and their descendants.

    A group must be that of a process which has not been reaped: else its number may be a stranger's.
    """

    def __init__(self, marks: Iterable[str], groups: Iterable[int]) -> None:
        self._marks = tuple(mark.encode() for mark in marks)
        self._groups = frozenset(groups)

    def members(self) -> set[int]:
        """Return the ids of all that live, without this process."""
        found: set[int] = set()
        children: dict[int, list[int]] = {}
        for pid in _process_ids():
            place = _place(pid)
            if place is None:
                continue
            parent, group = place
            children.setdefault(parent, []).append(pid)
            if group in self._groups or self._carries(pid):
                found.add(pid)
        waiting = list(found)
        while waiting:
            for child in children.get(waiting.pop(), ()):
                if child not in found:
                    found.add(child)
                    waiting.append(child)
        return found - {os.getpid()}

    def end(self) -> "Tidiers":
        """Kill all members but those that tidy up, and look again until none is left; return the spared ones."""
        if not os.path.exists("/proc/self/stat"):  # noqa: PTH110 (pathlib is slow to import)
            for group in self._groups:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(group, signal.SIGKILL)
            return Tidiers(self, ())
        deadline = time.monotonic() + _GIVE_UP_S
        while True:
            members = self.members()
            spared = [pid for pid in members if _tidies(pid)]
            others = members.difference(spared)
            if not others or time.monotonic() > deadline:
                return Tidiers(self, spared)
            _signal(others, signal.SIGKILL)
            time.sleep(_LOOK_AGAIN_S)

    def _carries(self, pid: int) -> bool:
        if not self._marks:
            return False
        environment = _read(pid, "environ")
        start = environment.find(f"{MARK}=".encode())
        if start < 0:
            return False
        carried = environment[start:].partition(b"\0")[0]
        return any(mark in carried for mark in self._marks)


class Tidiers:
    """Processes that were spared, because they remove what the others left."""

    def __init__(self, family: Family, spared: Iterable[int]) -> None:
        self._family, self._spared = family, list(spared)

    def finish(self) -> None:
        """Give them a moment to end by themselves, then kill what is left of the family."""
        if not self._spared:
            return
        _signal(self._spared, signal.SIGCONT)
        deadline = time.monotonic() + _TIDY_S
        while (left := self._family.members()) and time.monotonic() < deadline:
            time.sleep(_LOOK_AGAIN_S)
        _signal(left, signal.SIGKILL)


def _signal(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _process_ids() -> list[int]:
    try:
        return [int(name) for name in os.listdir("/proc") if name.isdigit()]  # noqa: PTH208
    except OSError:
        return []


def _place(pid: int) -> tuple[int, int] | None:
    """Return parent and process group of a process; ``None`` for one that has ended."""
    words = _read(pid, "stat").rpartition(b")")[2].split()
    if len(words) < 3 or words[0] in (b"Z", b"X"):
        return None
    return int(words[1]), int(words[2])


def _tidies(pid: int) -> bool:
    line = _read(pid, "cmdline")
    return any(sign in line for sign in _TIDIERS)


def _read(pid: int, name: str) -> bytes:
    try:
        fd = os.open(f"/proc/{pid}/{name}", os.O_RDONLY)
    except OSError:  # it ended, or it belongs to somebody else
        return b""
    try:
        chunks = []
        while chunk := os.read(fd, 1 << 16):
            chunks.append(chunk)
        return b"".join(chunks)
    except OSError:
        return b""
    finally:
        os.close(fd)
