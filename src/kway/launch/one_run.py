"""One run at a time in a process: generators of random numbers and flags of torch are there once."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import ParamSpec, TypeVar

from kway.errors import UsageError

P = ParamSpec("P")
T = TypeVar("T")
# Marks on threads: on the main one which run goes on, on others whose run they are part of.
_GOES_ON, _PART_OF, _LOCK = "_kway_run", "_kway_part_of", "_kway_lock_of_"


@dataclass(frozen=True, eq=False)
class _Run:
    """A run that ``thread`` of the process ``pid`` called. ``inside``: an entry for it, and for each inside it."""

    thread: threading.Thread
    pid: int
    inside: list[None] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        """Whether nobody is left to end it: of a process that this one was forked from, or of a thread that ended."""
        return self.pid != os.getpid() or not self.thread.is_alive()


@contextmanager
def only_run() -> Iterator[None]:
    """While open, no other thread of this process can open one. A run inside the run of the same thread can.

    Raises ``UsageError`` where a run goes on in another thread.
    """
    marks = vars(threading.main_thread())
    own = _Run(_caller(), os.getpid())
    # One of all threads: a dict takes the first one in one step. A process that was forked has its own.
    lock = marks.setdefault(f"{_LOCK}{own.pid}", threading.Lock())
    with lock:
        first = marks.setdefault(_GOES_ON, own)
        if first.is_over:
            first = marks[_GOES_ON] = own
        _check(first, own)
        first.inside.append(None)
    try:
        yield
    finally:
        with lock:
            # Loops of the user's own may end in another order than they began.
            first.inside.pop()
            if not first.inside and marks.get(_GOES_ON) is first:
                marks.pop(_GOES_ON)


def alone(function: Callable[P, T]) -> Callable[P, T]:
    """Let a call of ``function`` be the only run of its process: see ``only_run``."""

    # Not as the context manager would do it by itself: a frame of Python's own would be in what the user's code raises.
    @wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        with only_run():
            return function(*args, **kwargs)

    return called


def check_only_run() -> None:
    """Raise ``UsageError`` where a run goes on in another thread of this process."""
    first = vars(threading.main_thread()).get(_GOES_ON)
    if first is not None and not first.is_over:
        _check(first, _Run(_caller(), os.getpid()))


def make_part(thread: threading.Thread) -> threading.Thread:
    """Let ``thread`` be part of the run of the calling one: what is called there is called inside that run."""
    vars(thread)[_PART_OF] = _caller()
    return thread


def _caller() -> threading.Thread:
    current = threading.current_thread()
    found: threading.Thread = vars(current).get(_PART_OF, current)
    return found


def _check(first: _Run, own: _Run) -> None:
    if first.thread is not own.thread:
        raise UsageError(
            "a run is going on in another thread of this process",
            "runs of one process draw from one generator, and each would change the other's numbers",
            "call them one after the other, or use kway.map or processes of their own",
        )
