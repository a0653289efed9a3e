"""The last one to leave: ends ranks, and removes their temporary files, where their parent could not.

A parent that is killed can do nothing, and a rank that is stuck outside of Python does not notice. So a bare
interpreter watches: its standard input is a pipe that the parent holds. When that closes without the word
``done``, or the parent is no longer there (a forked child may hold the pipe's other end), all process groups
that it was told about are killed. This file runs on its own, without kway, as ``guard.py PARENT [FOLDER]``.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

_LOOK_S = 1.0


class Guard:
    """Starts the watching process. ``folder`` is removed with the ranks if they outlive this process."""

    def __init__(self, folder: Path | None) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(os.getpid()), *([str(folder)] if folder else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def watch(self, group: int) -> None:
        """Have a process group killed if this process ends before ``dismiss``."""
        self._tell(f"{group}\n")

    def dismiss(self) -> None:
        """Say that all is gone already."""
        self._tell("done\n")
        with contextlib.suppress(OSError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        self._process.wait()

    def _tell(self, text: str) -> None:
        # Somebody may have killed the guard: ranks have their own control sockets beside it.
        with contextlib.suppress(OSError, ValueError):
            if self._process.stdin is not None:
                self._process.stdin.write(text.encode())
                self._process.stdin.flush()


def _wait(parent: int) -> list[int] | None:
    """Return the groups to kill when the parent is gone, or ``None`` after ``done``."""
    heard = b""
    while True:
        # Read to the end even of a parent that was gone before this process could look.
        there = os.getppid() == parent
        if select.select([0], [], [], _LOOK_S if there else 0)[0]:
            chunk = os.read(0, 4096)
            heard += chunk
            if not chunk:
                break
        elif not there:
            break
    words = heard.split()
    return None if b"done" in words else [int(word) for word in words]


def _main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups = _wait(int(sys.argv[1]))
    for group in groups or ():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
    if groups is not None and len(sys.argv) > 2:
        import shutil  # slow to import, and seldom needed

        shutil.rmtree(sys.argv[2], ignore_errors=True)


if __name__ == "__main__":
    _main()
