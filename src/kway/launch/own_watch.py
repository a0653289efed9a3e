"""Ranks that kway did not start watch each other: a thread in each of them, over the store of their group.

The rank that is late speaks for itself, with its stack, and leaves; its launcher ends the others. Where it cannot
(its process is stopped, or stuck in code that never lets another thread run) the first of the others does, without.
Ranks that all wait, in calls that do not belong together, end whether or not a time was given: nothing else ends them.
"""

import contextlib
import json
import math
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextvars import ContextVar
from datetime import timedelta
from typing import Any

from kway.errors import KwayError, MispairedError, StallError
from kway.launch.lifeline import flush_output
from kway.launch.stall import behind, check_together, described, is_late
from kway.launch.status import Report, Status, here, is_announced
from kway.world import World

_LOOK_S = 5.0
_GRACE_S = 10.0
_NAME = "kway-stall"
# Of the work that goes on here: the process, and its status.
_GOES_ON: ContextVar[tuple[int, Status] | None] = ContextVar("kway_status", default=None)


@contextlib.contextmanager
def watching(world: World, timeout: timedelta | None) -> Iterator[Status]:
    """Yield the status of this process; with ``timeout``, end the work inside when a rank is late.

    Without one, ranks that no parent of kway's looks at end where they wait for each other in vain.

    A process that is alone is interrupted and raises ``StallError``, or ends where it cannot be; one of several
    ends with exit code 1, so that whoever started the ranks ends the others.

    Work inside of other work (``kway.evaluate`` in a loop of the user's) has the status of that: the rank is at one
    thing, its collectives are one series, and it has not left once the inner work is over.
    """
    before = _GOES_ON.get()
    if before is not None and before[0] == os.getpid():
        with before[1].doing("start"), _watched(world, before[1], timeout):
            yield before[1]
        return
    status = here(world.rank)
    status.at("start")
    _GOES_ON.set((os.getpid(), status))
    try:
        with _watched(world, status, timeout):
            yield status
    finally:
        # Not by a token: a notebook may close a loop in another context than it was opened in.
        _GOES_ON.set(before)
        status.at("idle")


@contextlib.contextmanager
def _watched(world: World, status: Status, timeout: timedelta | None) -> Iterator[None]:
    """End the work inside where a rank is late: see ``watching``."""
    if timeout is None and (world.size == 1 or is_announced() or _looks()):
        yield
        return
    watch = _Watch(world, status, math.inf if timeout is None else timeout.total_seconds())
    try:
        with watch:
            yield
    except KeyboardInterrupt:
        if watch.error is not None:
            raise watch.error from None
        raise


class _Watch:
    def __init__(self, world: World, status: Status, timeout: float) -> None:
        self.error: StallError | None = None
        self._world, self._status, self._timeout = world, status, timeout
        self._store = _store() if world.size > 1 else None
        self._reports: dict[int, tuple[int, Report]] = {}
        self._turn = 0
        self._over = threading.Event()
        self._watched = threading.current_thread()
        self._thread = threading.Thread(target=self._run, name=_NAME, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(_LOOK_S)
        if self._store is not None and (self._turn or self._timeout < math.inf):
            # The last word: this rank is nobody any longer that others could wait for.
            with contextlib.suppress(RuntimeError):
                self._tell(self._status.report(), over=True)

    def _run(self) -> None:
        pause = min(_LOOK_S, self._timeout / 4)
        since: float | None = None
        while not self._over.wait(pause):
            try:
                reports, silent = self._look(), False
            except RuntimeError:
                reports, silent = [self._status.report()], True
            now = time.monotonic()
            try:
                check_together(sorted(reports, key=lambda report: report.rank), now)
            except MispairedError as error:
                # All ranks find it out within one look. A launcher may end the others as soon as one has left.
                if self._world.rank == 0 or not self._over.wait(_GRACE_S):
                    self._leave(error, "", speaks=True)
                return
            late = behind(reports)
            if late is None or not is_late(late, reports, now, self._timeout):
                since = None
                continue
            since = since or now
            if self._acts(late, reports, now - since):
                self._end(late, reports, now, silent and late.waiting)
                return

    def _acts(self, late: Report, reports: list[Report], known_s: float) -> bool:
        """Whether this rank ends itself now, ``known_s`` seconds after it knew of the late one."""
        grace, others = min(_GRACE_S, self._timeout), [r.rank for r in reports if r.rank != late.rank]
        if late.rank == self._world.rank:
            return True
        return known_s > (grace if self._world.rank == min(others) else 2 * grace)

    def _look(self) -> list[Report]:
        """Say where this rank is, and read where the others are, on this process's own clock."""
        mine = self._status.report()
        if self._store is None:
            return [mine]
        self._turn += 1
        self._tell(mine)
        for rank in range(self._world.size):
            key = f"status/{rank}"
            if rank == self._world.rank or not self._store.check([key]):
                continue
            turn, step, calls, age, phase, waiting, *inside = json.loads(self._store.get(key))
            if rank not in self._reports or self._reports[rank][0] != turn:
                since = time.monotonic() - age
                self._reports[rank] = turn, Report(rank, step, calls, since, phase, waiting, *inside)
        return [mine, *(report for _, report in self._reports.values())]

    def _tell(self, mine: Report, over: bool = False) -> None:
        age = time.monotonic() - mine.since
        phase = "idle" if over else mine.phase
        turn = -1 if over else self._turn
        told = json.dumps([turn, mine.step, mine.calls, age, phase, mine.waiting, mine.collective])
        assert self._store is not None
        self._store.set(f"status/{mine.rank}", told)

    def _end(self, late: Report, reports: list[Report], now: float, silent: bool) -> None:
        """End this process, or interrupt it where it is alone. ``silent``: the store does not answer any more."""
        text = described(late, sorted(reports, key=lambda report: report.rank), now)
        stack, own = "", self._world.rank
        if late.rank == own:
            frame = sys._current_frames().get(self._watched.ident or 0)
            lines = traceback.format_stack(frame) if frame is not None else []
            stack = f"Stack of rank {late.rank} (most recent call last):\n{''.join(lines).rstrip()}"
        else:
            text += "; it did not answer: its process is stopped, or stuck outside of Python"
        if silent:
            text += "; the store that the ranks share does not answer: look at the process that holds it, mostly rank 0"
        error = StallError(late.rank, 1, text, stack)
        if self._world.size == 1 and self._watched is threading.main_thread():
            self.error = error
            signal.pthread_kill(self._watched.ident or 0, signal.SIGINT)
            if self._over.wait(_GRACE_S):
                return
        self._leave(
            error, stack, late.rank == own or own == min(r.rank for r in reports if r.rank != late.rank)
        )

    def _leave(self, error: KwayError, stack: str, speaks: bool) -> None:
        """End this process."""
        if speaks:
            text = error.headline if isinstance(error, StallError) else str(error)
            # The user may have replaced the stream: the process must end all the same.
            with contextlib.suppress(Exception):
                print(*([stack] if stack else []), f"kway: error: {text}", sep="\n", file=sys.stderr)
        flush_output()
        os._exit(error.exit_code)


def _looks() -> bool:
    """Whether this process looks at others already: a call inside of a loop, of which that one tells."""
    return any(thread.name == _NAME for thread in threading.enumerate())


def _store() -> Any:
    """Return a way to the store of the default group that no other call of this process blocks."""
    from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

    store: Any = _get_default_store()
    return PrefixStore("kway-stall", store.clone() if hasattr(store, "clone") else store)
