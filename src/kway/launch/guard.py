"""The last one to leave: ends ranks, and removes temporary files, where their parent could not.

A parent that is killed can do nothing, and a rank that is stuck outside of Python does not notice. So a bare
interpreter watches: its standard input is a pipe that the parent holds. When that closes without the word
``done``, or the parent is no longer there (a forked child may hold the pipe's other end), everything that ranks
started is killed, and the folders that it was told about are removed.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

from kway.launch.family import Family

_LOOK_S = 1.0
_DISMISS_S = 2.0
_SOURCES = str(Path(__file__).resolve().parents[2])
_CODE = "import sys; sys.path.insert(0, sys.argv[3]); from kway.launch.guard import main; main()"


class Guard:
    """Starts the watching process, for the ranks whose environment carries ``mark``."""

    def __init__(self, mark: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _CODE, str(os.getpid()), mark, _SOURCES],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def watch(self, group: int) -> None:
        """Have a process group killed as well if this process ends before ``dismiss``."""
        self._tell(f"group {group}")

    def forget(self, group: int) -> None:
        """Leave a process group alone that is gone: its number may be a stranger's by then."""
        self._tell(f"gone {group}")

    def remove(self, folder: Path) -> None:
        """Have a folder removed if this process ends before ``dismiss``."""
        self._tell(f"folder {folder.absolute()}")

    def dismiss(self) -> None:
        """Say that all is gone already."""
        self._tell("done")
        with contextlib.suppress(OSError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        try:
            self._process.wait(_DISMISS_S)
        except subprocess.TimeoutExpired:  # somebody stopped it
            self._process.kill()
            self._process.wait()

    def _tell(self, text: str) -> None:
        # Somebody may have killed the guard: ranks have their own control sockets beside it.
        with contextlib.suppress(OSError, ValueError):
            if self._process.stdin is not None:
                self._process.stdin.write(os.fsencode(text) + b"\0")
                self._process.stdin.flush()


def _wait(parent: int) -> list[bytes] | None:
    """Return what was heard when the parent is gone, or ``None`` after ``done``."""
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
    messages = heard.split(b"\0")[:-1]  # behind the last mark of an end stands at most half a message
    return None if b"done" in messages else messages


def left(messages: list[bytes]) -> tuple[list[int], list[bytes]]:
    """Return the groups of processes and the folders that are there after these messages, which came in this order."""
    groups: dict[int, None] = {}
    folders: list[bytes] = []
    for message in messages:
        kind, _, value = message.partition(b" ")
        if kind == b"group":
            groups[int(value)] = None
        elif kind == b"gone":
            # A later group may have its number again.
            groups.pop(int(value), None)
        elif kind == b"folder":
            folders.append(value)
    return [*groups], folders


def main() -> None:
    """Watch; the arguments of the process are the parent's id and the mark."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    messages = _wait(int(sys.argv[1]))
    if messages is None:
        return
    groups, folders = left(messages)
    Family([sys.argv[2]], groups).end().finish()
    for folder in folders:
        import shutil  # slow to import, and seldom needed

        shutil.rmtree(folder, ignore_errors=True)
