"""One rank as its parent sees it: a fresh interpreter in a session of its own, and the wire to it."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kway.launch.channel import Inbox, frame
from kway.launch.output import Output

SOURCES = str(Path(__file__).resolve().parents[2])
# -P keeps the current folder out of the way of the standard library until the parent's own path arrives.
_CODE = (
    "import sys; sys.path.insert(0, sys.argv[3]); from importlib import import_module; "
    "import_module(sys.argv[1]).main(int(sys.argv[2]))"
)


class RankProcess:
    """Starts one rank, which runs ``main`` of the module ``entry``.

    ``inherit``: a further descriptor that the rank may use, under the same number.
    """

    def __init__(
        self, rank: int, entry: str, environment: Mapping[str, str], output: Output, inherit: int = -1
    ) -> None:
        self.rank = rank
        self.inbox = Inbox(f"rank {rank}")
        self.sock, theirs = socket.socketpair()
        with theirs:
            self._process = self._start(entry, environment, theirs.fileno(), inherit)
        for name, pipe in (("stdout", self._process.stdout), ("stderr", self._process.stderr)):
            if pipe is not None:
                output.add(rank, name, os.dup(pipe.fileno()))
                pipe.close()

    def _start(
        self, entry: str, environment: Mapping[str, str], control: int, inherit: int
    ) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(
            [sys.executable, "-P", "-c", _CODE, entry, str(control), SOURCES],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=dict(environment),
            pass_fds=[control, *([inherit] if inherit >= 0 else [])],
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        """The process id, which is also that of its process group."""
        return self._process.pid

    def send(self, message: Any, timeout: float) -> bool:
        """Send one message; false where the rank is gone (its end is noticed by whoever waits for it)."""
        self.sock.settimeout(timeout)
        try:
            self.sock.sendall(frame(message))
        except OSError:
            return False
        return True

    def receive(self) -> list[Any]:
        """Return the messages that are there, without waiting."""
        self.sock.setblocking(False)
        return self.inbox.receive(self.sock)

    def ended(self) -> bool:
        """Whether the process has ended. Its id stays taken until ``reap``."""
        if self.reaped:
            return True
        if not hasattr(os, "waitid"):
            return self._process.poll() is not None
        try:
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:
            return True

    def wait(self, timeout: float) -> bool:
        """Wait for the end of the process; false where it goes on after ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        while not self.ended():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.005)
        return True

    @property
    def reaped(self) -> bool:
        """Whether nothing is left of the process: from then on its id may be that of a stranger's group."""
        return self._process.returncode is not None

    def status(self) -> int:
        """Return the status of the process, as ``subprocess`` gives it; one that goes on is ended.

        Not reaped by this: what it started is found by its process group, too.
        """
        if self.reaped or not hasattr(os, "waitid"):
            return self.reap()
        if not self.ended():
            self._kill()
        try:
            found = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        except ChildProcessError:
            found = None
        if found is None:
            return self.reap()
        return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status

    def reap(self) -> int:
        """End the process, wait for it and return its status as ``subprocess`` gives it."""
        if not self.reaped:
            self._kill()
        return self._process.wait()

    def close(self) -> None:
        """Close the wire."""
        self.sock.close()

    def _kill(self) -> None:
        # Where a status cannot be read without reaping, this is the last moment to reach the process group.
        kill = os.kill if hasattr(os, "waitid") else os.killpg
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(self.pid, signal.SIGKILL)
