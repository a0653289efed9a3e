"""Signals that ask a process to leave: as an exception, so that it can first take its ranks away, or as a wish."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

from kway.world import StopRequest

# What schedulers send some time before they take a machine away.
_WISHES = (signal.SIGTERM, signal.SIGUSR1)


@contextlib.contextmanager
def sigterm_raises() -> Iterator[None]:
    """Turn SIGTERM into ``SystemExit(143)`` while the block runs.

    Only where signals reach this thread and nobody else handles SIGTERM: a user's own handler stays.
    """
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    ):
        yield
        return
    signal.signal(signal.SIGTERM, _leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextlib.contextmanager
def asked_to_stop(stop: StopRequest) -> Iterator[None]:
    """Turn the first SIGTERM or SIGUSR1 into a wish in ``stop`` while the block runs; the next one ends the process.

    Only where signals reach this thread; a user's own handler stays.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def take(number: int, frame: FrameType | None) -> None:
        if stop.by:
            raise SystemExit(128 + number)
        stop.by = signal.Signals(number).name

    ours = [number for number in _WISHES if signal.getsignal(number) in (signal.SIG_DFL, _leave)]
    before = {number: signal.signal(number, take) for number in ours}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
