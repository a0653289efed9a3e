"""A rank's end of its control socket: messages to and from the parent, and the news that it is gone."""

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from kway.launch.channel import Inbox, frame
from kway.launch.family import own_family


class Lifeline:
    """Talks over the descriptor ``control``, which the parent holds the other end of."""

    def __init__(self, control: int) -> None:
        self._sock = socket.socket(fileno=control)
        self._lock = threading.Lock()
        self._messages = self._receive()

    def first(self) -> Any:
        """Wait for the first message."""
        return next(self._messages)

    def watch(self, act: Callable[[Any], None]) -> None:
        """From now on call ``act``, in a thread, with each further message; ``None`` is the last one.

        If there is nothing more to come and ``None`` has not been said, the parent is gone: then this process
        ends with all that it started, loader workers included.
        """
        threading.Thread(target=self._watch, args=(act,), name="kway-control", daemon=True).start()

    def send(self, kind: str, value: Any = None) -> None:
        """Send one message; any thread may."""
        with self._lock:
            self._sock.sendall(frame((kind, value)))

    def _receive(self) -> Iterator[Any]:
        inbox = Inbox("this rank")
        while not inbox.closed:
            yield from inbox.receive(self._sock)

    def _watch(self, act: Callable[[Any], None]) -> None:
        for message in self._messages:
            act(message)
            if message is None:
                return
        own_family().end()
        os.kill(os.getpid(), signal.SIGKILL)


def write_whole_lines() -> None:
    """Make what this process prints leave it line by line, as on a terminal, though it goes to a pipe."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(line_buffering=True, errors="backslashreplace")


def flush_output() -> None:
    """Let what this process printed leave it, as far as its streams can. What they raise ends nothing.

    The user's code may have put any object in their place, one without ``flush`` too: then the cause of a failure,
    or a result, must still get to the parent. Below such an object lies the stream that it writes to.
    """
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        with contextlib.suppress(Exception):
            stream.flush()  # type: ignore[union-attr]
