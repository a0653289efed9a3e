"""Where each rank of a machine is: a line a rank in a small mapped file, which ranks write and their parent reads."""

import mmap
import os
import struct
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

# What a rank can be at. The first stands for a rank that has not said anything yet.
PHASES = (
    "",
    "start",
    "input",
    "forward/backward",
    "evaluate",
    "save",
    "tune",
    "measure",
    "main only",
    "own code",
    "idle",
)
STEP = "forward/backward"
_CODES = {name: code for code, name in enumerate(PHASES)}
# What a rank can be inside of. The first stands for one of no name.
COLLECTIVES = (
    "",
    "all-reduce",
    "all-gather",
    "broadcast",
    "all-to-all",
    "all-gather of objects",
    "gather of objects",
    "barrier",
    "turn",
    "p.evaluate",
    "p.gather",
    "p.barrier",
    "p.save",
    "p.checkpoint",
    "p.resume",
    "kway.evaluate",
    "kway.predict",
)
# How the calls of a user's code begin: where all ranks must have come to the same one.
CALL = "p."
_CALLS = (CALL, "kway.")
_KINDS = {name: code for code, name in enumerate(COLLECTIVES)}
# Number of the writing (from 1), step, collectives begun, time of the last sign, phase, inside a collective, which
# one, number again.
_LINE = struct.Struct("=QqQdBBB5xQ")
_CALLS_AT = 16
_write_line = _LINE.pack_into
# A line is written into two places in turn, so that one of them is whole whenever its rank is stopped or made to wait
# for a core in the middle of writing. A cache line each: ranks do not disturb each other.
_PLACE = 64
_STRIDE = 2 * _PLACE
_WORD = 8
_TRIES = 100
VARIABLE = "KWAY_STATUS"
BOARD = "status"


@dataclass(frozen=True)
class Report:
    """Where one rank is. ``step``: optimizer steps that it has begun; ``calls``: collectives that it has begun.

    ``waiting``: it is inside a collective, ``collective`` (one of ``COLLECTIVES``) was the last that it was inside of;
    ``since``: its last sign of life, monotonic time in seconds.
    """

    rank: int
    step: int
    calls: int
    since: float
    phase: str
    waiting: bool
    collective: str = ""

    @property
    def doing(self) -> str:
        """The phase in words: what a rank does that waits for the others inside a step is ``reduce``."""
        if not self.waiting:
            return self.phase
        if self.collective.startswith(_CALLS):
            return f"inside {self.collective}"
        return "reduce" if self.phase == STEP else f"{self.phase}, inside a collective"


class Status:
    """A rank's own line: says what it is at. Written by one thread at a time; a writing takes under a microsecond.

    Without ``memory`` (where nobody reads it) it is a line that only this process sees. ``waited_s`` adds up the
    seconds spent inside collectives, for which ``waiting`` is a context manager.
    """

    def __init__(self, memory: Any = None, rank: int = 0) -> None:
        self._memory = bytearray(_STRIDE * (rank + 1)) if memory is None else memory
        # To set a single number: where ``pack_into`` clears it first, this is seen before or after.
        self._words = memoryview(self._memory).cast("Q")
        self.rank = rank
        # Who wrote this line before, for an earlier task, must not count as the newer.
        first = rank * _STRIDE
        self._place, line = _newest(self._memory, rank) or (first, bytes(_LINE.size))
        self._next = 2 * first + _PLACE - self._place
        self._turn = _LINE.unpack(line)[0]
        self._calls = self._code = self._step = self._kind = 0
        self._inside = False
        self.waited_s = 0.0
        self.waiting = _Waiting(self)
        self._notes: list[tuple[str, float, float]] | None = None

    @classmethod
    def open(cls, path: Path, rank: int) -> Self:
        """Open the line of ``rank`` in the file of a ``Board``."""
        with path.open("r+b") as file:
            return cls(mmap.mmap(file.fileno(), 0), rank)

    def at(self, phase: str, step: int | None = None) -> None:
        """Enter a phase (one of ``PHASES``); ``step``: the number of the optimizer step that is begun, from 1."""
        self._code = _CODES[phase]
        if step is not None:
            self._step = step
        self._write(time.monotonic())

    def beat(self) -> None:
        """Give a sign of life: something got done, though the phase goes on."""
        self._write(time.monotonic())

    def end(self) -> None:
        """Have no work any more. Where the line says so already it stays: what was done last stands there."""
        if self.report().phase != "idle":
            self.at("idle")

    @contextmanager
    def doing(self, phase: str) -> Iterator[None]:
        """Be at ``phase`` while open, then again at what was before, in the step of before."""
        before, step = PHASES[self._code], self._step
        self.at(phase)
        try:
            yield
        finally:
            self.at(before, step)

    def note(self, notes: list[tuple[str, float, float]] | None) -> None:
        """From now on add each collective that this rank waited in: name, begin and end in monotonic seconds."""
        self._notes = notes

    def report(self) -> Report:
        """Return what the line says."""
        return _read(self._memory, self.rank) or _silent(self.rank)

    def _write(self, now: float) -> None:
        self._turn = turn = self._turn + 1
        place = self._next
        self._next, self._place = self._place, place
        _write_line(
            self._memory,
            place,
            turn,
            self._step,
            self._calls,
            now,
            self._code,
            self._inside,
            self._kind,
            turn,
        )

    def _begin(self) -> None:
        self._calls += 1
        # One aligned number: the line need not be written anew for it.
        self._words[(self._place + _CALLS_AT) // _WORD] = self._calls

    def _enter(self) -> float:
        self._calls += 1
        self._inside = True
        now = time.monotonic()
        self._write(now)
        return now

    def _leave(self, entered: float) -> None:
        self._inside = False
        now = time.monotonic()
        self._write(now)
        self.waited_s += now - entered
        if self._notes is not None:
            self._notes.append((COLLECTIVES[self._kind], entered, now))


class _Waiting:
    """Marks its status as inside a collective while open. See ``comm.group.Watch``."""

    def __init__(self, status: Status) -> None:
        self._status = status
        self._entered = 0.0

    def __enter__(self) -> None:
        self._entered = self._status._enter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._status._leave(self._entered)

    def inside(self, name: str) -> Self:
        """Be inside a collective of that name (one of ``COLLECTIVES``) while open."""
        self._status._kind = _KINDS[name]
        return self

    def begun(self) -> None:
        """Count a collective that the host does not wait for."""
        self._status._begin()


class Board:
    """The lines of ``size`` ranks, in a new file. Ranks open it with ``Status.open``."""

    def __init__(self, path: Path, size: int) -> None:
        self.path, self.size = path, size
        # Written, not only sized: a page that the file system cannot provide later would kill a rank.
        path.write_bytes(bytes(_STRIDE * size))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)
        self._last = [_silent(rank) for rank in range(size)]

    def clear(self) -> None:
        """Forget what was said. Only while no rank writes."""
        self._memory[:] = bytes(len(self._memory))
        self._last = [_silent(rank) for rank in range(self.size)]

    def read(self, size: int | None = None) -> list[Report]:
        """Return where the first ``size`` ranks (all, where ``None``) are, in rank order.

        What cannot be read says nothing: that rank is where it was seen last.
        """
        for rank in range(self.size if size is None else size):
            self._last[rank] = _read(self._memory, rank) or self._last[rank]
        return self._last[:size]

    def close(self) -> None:
        """Let go of the file."""
        self._memory.close()


def _newest(memory: Any, rank: int) -> tuple[int, bytes] | None:
    """Return place and bytes of the line that a rank wrote last to its end.

    ``None`` where it wrote without a pause. One that stands still, wherever, has left one of both places whole.
    """
    begin, before = rank * _STRIDE, b""
    for _ in range(_TRIES):
        both = bytes(memory[begin : begin + _STRIDE])
        # The same twice, and whole at the second time: then no writing there began before the first was over.
        found = [
            (begin + at, both[at : at + _LINE.size])
            for at in (0, _PLACE)
            if both[at : at + _PLACE] == before[at : at + _PLACE]
            and both[at : at + _WORD] == both[at + _LINE.size - _WORD : at + _LINE.size]
        ]
        if found:
            return max(found, key=lambda place: int.from_bytes(place[1][:_WORD], sys.byteorder))
        before = both
    return None


def _read(memory: Any, rank: int) -> Report | None:
    found = _newest(memory, rank)
    if found is None:
        return None
    _, step, calls, since, code, inside, kind, _ = _LINE.unpack(found[1])
    return Report(rank, step, calls, since, PHASES[code], bool(inside), COLLECTIVES[kind])


def _silent(rank: int) -> Report:
    return Report(rank, 0, 0, 0.0, "", False)


def announce(path: Path, rank: int, watched: bool) -> None:
    """Let ``here`` find the line of ``rank`` in this process, and in no process that it starts."""
    os.environ[VARIABLE] = f"{os.getpid()}:{rank}:{int(watched)}:{path}"


def here(rank: int = 0, environ: Mapping[str, str] | None = None) -> Status:
    """Return the status of this process: its line on the board of its parent, or one of its own as ``rank``."""
    found = _announced(os.environ if environ is None else environ)
    if found is not None:
        # Without the file the parent is gone, and nobody reads.
        with suppress(OSError, ValueError):
            return Status.open(found[2], found[0])
    return Status(rank=rank)


def is_announced(environ: Mapping[str, str] | None = None) -> bool:
    """Whether a parent of kway's looks at what this process is at."""
    return _announced(os.environ if environ is None else environ) is not None


def watched(environ: Mapping[str, str] | None = None) -> bool:
    """Whether the parent of this process ends a job that makes no progress."""
    found = _announced(os.environ if environ is None else environ)
    return found is not None and found[1]


def _announced(environ: Mapping[str, str]) -> tuple[int, bool, Path] | None:
    pid, _, rest = environ.get(VARIABLE, "").partition(":")
    if pid != str(os.getpid()):
        return None
    rank, watched, path = rest.split(":", 2)
    return int(rank), watched == "1", Path(path)
