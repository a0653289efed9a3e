"""A rank that is told to end is gone in seconds, also out of a call that hears no signal.

Python runs its handlers between its own instructions. A collective of Gloo whose other ranks are late returns when it
is over, or when its time limit is, which may be never. So a thread hears of each signal as it arrives, by the
descriptor to which Python writes its number, and ends the process where the main thread does not act on it.
"""

import atexit
import contextlib
import ctypes
import os
import selectors
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator

from kway.launch.interrupt import ONE_S, EndedBySignal, OwnHandler, default_interrupts_raise
from kway.launch.lifeline import flush_output
from kway.launch.limit import within
from kway.launch.status import Status
from kway.world import World

# How long the main thread has to act on a signal, and how long it may take to say why the process ends.
GRACE_S, SAY_S = 3.0, 2.0
_LOOK_S = 0.1
# A handler may be called a moment before the signal's number is written, and clocks are read one after the other.
_SLACK_S = 0.02
_CREDENTIALS, _TIME = struct.Struct("3i"), struct.Struct("@ll")
# Linux's SO_TIMESTAMPNS, which Python does not name; what comes with a message has the same number.
_STAMPED = 35


@contextlib.contextmanager
def ends_in_time(
    world: World, status: Status | None = None, leaves: Callable[[], str] | None = None
) -> Iterator[None]:
    """End this rank where a signal that ends it is not acted on within ``GRACE_S``, while the block runs.

    With the exit code 128 + the signal's number, and a line that says so on standard error. At once where a second one
    comes half a second later or more; the first may be a wish (``interrupt.asked_to_stop``), which has time. Signals
    with a handler of the user's own, and those that Python does not handle, are none of its business.
    Only in the main thread, where signals arrive. ``leaves``: says what of the run can be gone on with.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    watch = _Watch(world, status, leaves)
    try:
        with default_interrupts_raise(), watch:
            yield
    finally:
        if watch.told:
            atexit.register(_let_go)


class _Watch:
    def __init__(self, world: World, status: Status | None, leaves: Callable[[], str] | None) -> None:
        self._world, self._status, self._leaves = world, status, leaves
        # Messages, of one number each: every one has its sender and its time.
        self._reader, self._writer = socket.socketpair(type=socket.SOCK_DGRAM)
        self._closer, self._closes = socket.socketpair()
        for each in (self._reader, self._writer):
            each.setblocking(False)
        self._known = sys.platform == "linux"
        if self._known:
            # Which process it is from: one that is forked here writes into the same socket.
            self._reader.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            # When it was written: a call of C that holds the interpreter keeps this thread, too, from noticing.
            self._reader.setsockopt(socket.SOL_SOCKET, _STAMPED, 1)
        # Where nobody says when, the main thread may have been somewhat faster than this one.
        self._slack_s = _SLACK_S if self._known else ONE_S
        self._before, self._passes_on = -1, False
        # The signal that nobody has acted on yet: when it was noticed and when it arrived, its number, and who is to.
        self._since: float | None = None
        self._came = 0.0
        self._number, self._handler = 0, signal.getsignal(signal.SIGINT)
        # The number of the last signal that is to end this process.
        self.told = 0
        self._thread = threading.Thread(target=self._run, name=_name(self._writer.fileno()), daemon=True)

    def __enter__(self) -> None:
        self._before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        # One around this one would see signals late, and has nothing to do that this one does not.
        self._passes_on = self._before >= 0 and _name(self._before) not in {
            each.name for each in threading.enumerate()
        }
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        found = signal.set_wakeup_fd(self._before, warn_on_full_buffer=False)
        if found != self._writer.fileno():  # somebody set another one meanwhile, who wants it still
            signal.set_wakeup_fd(found, warn_on_full_buffer=False)
        self._closes.close()
        self._thread.join()
        for each in (self._reader, self._writer, self._closer):
            each.close()

    def _run(self) -> None:
        # Not ``select``: a process may have more files open than that knows numbers.
        with selectors.DefaultSelector() as selector:
            for each in (self._reader, self._closer):
                selector.register(each, selectors.EVENT_READ)
            while True:
                found = selector.select(None if self._since is None else _LOOK_S)
                ready = [key.fileobj for key, _ in found]
                if self._reader in ready:
                    for number, came in self._arrived():
                        # What the main thread has heard meanwhile is over before this one counts.
                        self._look()
                        self._take(number, came)
                if self._closer in ready:
                    return
                self._look()

    def _arrived(self) -> Iterator[tuple[int, float]]:
        """Yield the numbers of the signals that this process itself got, and when, in monotonic seconds."""
        room = socket.CMSG_SPACE(_CREDENTIALS.size) + socket.CMSG_SPACE(_TIME.size) if self._known else 0
        while True:
            try:
                numbers, said, _, _ = self._reader.recvmsg(64, room)
            except BlockingIOError:
                return
            sender, came = os.getpid(), None
            for _, kind, data in said:
                if kind == socket.SCM_CREDENTIALS:
                    sender = _CREDENTIALS.unpack(data)[0]
                elif kind == _STAMPED:
                    seconds, nanoseconds = _TIME.unpack(data)
                    came = time.monotonic() - max(time.time() - seconds - nanoseconds / 1e9, 0.0)
            if sender != os.getpid():
                continue
            if self._passes_on:
                with contextlib.suppress(OSError):
                    os.write(self._before, numbers)
            for number in numbers:
                yield number, time.monotonic() if came is None else came

    def _take(self, number: int, came: float) -> None:
        handler, now = signal.getsignal(number), time.monotonic()
        if not isinstance(handler, OwnHandler):
            return
        if handler.ends and not handler.is_wish:
            self.told = number
        if not handler.is_another(came):
            return
        if self._since is None:
            self._since, self._came, self._number, self._handler = now, came, number, handler
        # By when they were noticed: both at once is a main thread that could not hear them before, but can now.
        elif handler.is_later(now, self._since) and handler.ends:
            # The main thread has not heard the one before.
            self._number = number
            self._end()

    def _look(self) -> None:
        """See whether the signal that arrived was acted on; end the process where it should be gone."""
        if self._since is None:
            return
        handler = self._handler
        # Only the main thread sets another one.
        moved_on = signal.getsignal(self._number) is not handler
        if not isinstance(handler, OwnHandler) or moved_on or handler.heard(self._came - self._slack_s):
            self._since = None
        elif not handler.is_wish and handler.ends and time.monotonic() - self._since > GRACE_S:
            self._end()

    def _end(self) -> None:
        words = (
            "interrupted" if self._number == signal.SIGINT else f"ended by {EndedBySignal(self._number).name}"
        )

        def say() -> None:
            said = [f"kway: {words}", self._where()]
            with contextlib.suppress(Exception):
                said.append(self._leaves() if self._leaves is not None else "")
            print(": ".join(filter(None, said)), file=sys.stderr)
            flush_output()

        # The process must end all the same where a disk does not answer, or the main thread is stuck in a stream.
        with contextlib.suppress(Exception):
            within(SAY_S, say)
        os._exit(128 + self._number)

    def _where(self) -> str:
        report = None if self._status is None else self._status.report()
        own = f"rank {self._world.rank} of {self._world.size}"
        if report is None or not report.waiting:
            return f"{own} was inside a call that did not return"
        named = f" ({report.collective})" if report.collective else ""
        step = f" in step {report.step}" if report.step else ""
        return f"{own} waited for the others{step}{named}"


def _name(descriptor: int) -> str:
    """Return how the thread is called that hears of what is written into ``descriptor``."""
    return f"kway-signals-{descriptor}"


def _let_go() -> None:
    """Have Python leave without taking process groups apart: that waits for what is under way in them.

    With it, at the very end of the process, no thread could do anything about a wait for ranks that are late. Groups
    with NCCL give up what is under way by themselves.
    """
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        for group in dist.distributed_c10d._world.pg_map:
            if "nccl" not in str(dist.get_backend_config(group)):
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
