"""A folder that one run has to itself for as long as it lives."""

import fcntl
import os
from contextlib import suppress
from pathlib import Path

from kway.errors import UsageError


class Hold:
    """Keeps other runs out of the existing ``folder`` until ``close``, or until this process ends.

    A lock on the folder itself: nothing is written into it, so a run that was killed leaves nothing to clear away.
    Where the file system knows no locks, nobody is kept out. Raises ``UsageError`` where another run has the folder,
    and ``OSError`` where it is gone or no folder.
    """

    def __init__(self, folder: Path) -> None:
        self._handle: int | None = None
        try:
            self._handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except PermissionError:  # a folder that may be written into but not listed
            return
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # One that failed before it wrote anything takes its folder away again, maybe between the two calls above.
            taken = not os.path.samestat(os.fstat(self._handle), folder.stat())
        except (BlockingIOError, FileNotFoundError):
            taken = True
        except OSError:
            taken = False
        if taken:
            self.close()
            raise UsageError(
                f"another run is at work in {folder}",
                "each would write over the other's files",
                "name another folder, or wait until it has ended",
            )

    def close(self) -> None:
        """Let others in. May be called twice."""
        if self._handle is not None:
            with suppress(OSError):
                # By name: a forked child that still has the descriptor must not hold the folder.
                fcntl.flock(self._handle, fcntl.LOCK_UN)
            os.close(self._handle)
            self._handle = None
