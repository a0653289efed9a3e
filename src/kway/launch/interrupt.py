"""Signals that ask a process to stop: as an exception, so that it can first take its ranks away, or as a wish."""

import contextlib
import math
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any

from kway.launch.loading import is_loading, once_loaded, send_again
from kway.world import StopRequest

# A second signal this soon after the first belongs to it: Ctrl-C twice, or a terminal that sends two kinds.
ONE_S = 0.5
# What a process does on these signals where nobody has asked for anything else.
_DEFAULTS: dict[int, Any] = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGHUP: signal.SIG_DFL,
}
# What schedulers send some time before they take a machine away.
_WISHES = (signal.SIGTERM, signal.SIGUSR1)


class EndedBySignal(SystemExit):
    """A signal ends this process: it leaves with exit code 128 + ``number``. ``name``: the signal's."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.number, self.name = number, signal.Signals(number).name


class Interrupted(KeyboardInterrupt):
    """A ``KeyboardInterrupt`` for a process that decides about its exit code itself.

    Python notes the plain one where it passes through code that was given as text (``exec``, which named tuples and
    data classes use), and ends the process by the signal then, even if it was caught and there is an exit code.
    """


class OwnHandler(ABC):
    """A handler of kway's. ``ends``: whether a signal can end the process; ``is_wish``: whether the next one does not.

    ``called``: when Python called it last; ``first``: when the first signal for it arrived, where somebody noticed
    that before it was called. Both in monotonic seconds.
    """

    ends, is_wish = True, False

    def __init__(self) -> None:
        self.called, self.first = -math.inf, math.inf
        self._order = -math.inf

    @abstractmethod
    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Act on a signal."""

    def is_another(self, came: float) -> bool:
        """Whether a signal that arrived at ``came`` is another order than the last one of which this was asked."""
        if not self.is_later(came, self._order):
            return False
        self._order, self.first = came, min(self.first, came)
        return True

    def heard(self, came: float) -> bool:
        """Whether it has been called for a signal that arrived at ``came``."""
        return self.called > came

    @staticmethod
    def is_later(now: float, first: float) -> bool:
        """Whether a signal at ``now`` is another order than that at ``first``."""
        return now - first >= ONE_S


class _Raise(OwnHandler):
    """Raises on the first signal, and again on one that comes much later.

    One that comes while a library is loaded which would lose the exception is kept until that is done.
    """

    def __init__(self, interrupt: type[KeyboardInterrupt] = KeyboardInterrupt) -> None:
        super().__init__()
        self._interrupt = interrupt
        self._last: float | None = None
        self._kept: int | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if is_loading(frame):
            if self._kept is None:
                self._kept = number
                once_loaded(self._again)
            return
        self.called = now
        if self._last is not None and now - self._last < ONE_S:
            return
        self._raise(number)

    def settle(self, raises: bool) -> None:
        """Raise for a signal that is kept still, or let it be."""
        number, self._kept = self._kept, None
        if raises and number is not None:
            self._raise(number)

    def _again(self) -> None:
        number, self._kept = self._kept, None
        if number is not None:
            send_again(number)

    def _raise(self, number: int) -> None:
        self._last = time.monotonic()
        raise self._interrupt if number == signal.SIGINT else EndedBySignal(number)


@contextlib.contextmanager
def signals_raise(interrupt: type[KeyboardInterrupt] = KeyboardInterrupt) -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into ``EndedBySignal``, and SIGINT into ``interrupt``.

    While the block runs, where signals reach this thread. A user's own handler stays, and so does a signal that is
    ignored: a process under ``nohup`` outlives its terminal.
    """
    act = _Raise(interrupt)
    ours = [n for n, usual in _DEFAULTS.items() if signal.getsignal(n) == usual]
    with _handled_by(act, ours), _settled(act):
        yield


@contextlib.contextmanager
def _settled(act: _Raise) -> Iterator[None]:
    """Leave no signal behind that ``act`` keeps. Where an exception is on its way, that is the end already."""
    try:
        yield
    except BaseException:
        act.settle(raises=False)
        raise
    act.settle(raises=True)


@contextlib.contextmanager
def default_interrupts_raise() -> Iterator[None]:
    """Turn SIGINT into ``KeyboardInterrupt`` by a handler of kway's, where Python's own would do it."""
    usual = signal.getsignal(signal.SIGINT) == signal.default_int_handler
    act = _Raise()
    with _handled_by(act, [signal.SIGINT] if usual else []), _settled(act):
        yield


class _Take(OwnHandler):
    """Takes the first signal as a wish; one that comes much later ends the process where ``ends``."""

    is_wish = True

    def __init__(self, stop: StopRequest, ends: bool) -> None:
        super().__init__()
        self._stop, self.ends = stop, ends
        self._first: float | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.called = now = time.monotonic()
        if self._first is None:
            self._first, self.is_wish = now, False
            # The wish may have come another way before, for the same reason.
            if not self._stop.by:
                self._stop.by, self._stop.direct = signal.Signals(number).name, True
        # A call of C may have kept it from hearing the first until now.
        elif self.ends and self.is_later(now, min(self._first, self.first)):
            raise EndedBySignal(number)


@contextlib.contextmanager
def asked_to_stop(stop: StopRequest, ends: bool = True) -> Iterator[None]:
    """Turn the first SIGTERM or SIGUSR1 into a wish in ``stop`` while the block runs; a later one ends the process.

    Only where signals reach this thread; a user's own handler stays. ``ends=False`` for a process whose parent
    decides about its end: one order to stop often reaches both.
    """
    handlers = {number: signal.getsignal(number) for number in _WISHES}
    ours = [n for n, handler in handlers.items() if handler == signal.SIG_DFL or isinstance(handler, _Raise)]
    with _handled_by(_Take(stop, ends), ours):
        yield


def ignore_wishes() -> None:
    """Let orders to stop be: for a process that has done what they ask for, and is about to leave."""
    for number in _WISHES:
        signal.signal(number, signal.SIG_IGN)


def ignore_interrupts() -> None:
    """Let Ctrl-C be: for a process that has said how it ends, and that taking torch down keeps for a moment."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


class Held:
    """Signals that arrived while they were held back."""

    def __init__(self) -> None:
        self.numbers: list[int] = []

    @property
    def hurry(self) -> bool:
        """Whether one has arrived: what waits should wait no longer."""
        return bool(self.numbers)


@contextlib.contextmanager
def signals_held(*, leaving: bool) -> Iterator[Held]:
    """Hold signals that ask to stop back while the block runs, so that an end is not left half-way.

    They act when the block is through; with ``leaving`` only as wishes and on handlers of the user's own: an
    exception is on its way already then, and what failed first is not to be lost.
    """
    held = Held()
    before = {number: signal.getsignal(number) for number in [*_DEFAULTS, *_WISHES]}
    with _handled_by(
        lambda number, frame: held.numbers.append(number),
        [
            number
            for number, handler in before.items()
            if handler not in (signal.SIG_IGN, None) and (number in _DEFAULTS or handler != signal.SIG_DFL)
        ],
    ):
        yield held
    for number in dict.fromkeys(held.numbers):
        handler = before[number]
        if not leaving or not (handler == _DEFAULTS.get(number) or isinstance(handler, _Raise)):
            signal.raise_signal(number)


@contextlib.contextmanager
def _handled_by(act: Callable[[int, FrameType | None], None], numbers: Iterable[int]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, act) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            # What was set meanwhile, such as to ignore it from now on, stays.
            if signal.getsignal(number) is act:
                signal.signal(number, handler)
