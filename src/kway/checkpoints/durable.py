"""Files and folders that are on the disk, not only in the system's cache, when a call returns."""

import errno
import fcntl
import hashlib
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

_CHUNK = 4 << 20  # bytes: large enough that hashing and writing leave the interpreter to the training thread


@dataclass(frozen=True)
class Sum:
    """What identifies a file's content: ``size`` in bytes and ``sha256`` in base 16."""

    size: int
    sha256: str


class DurableFile:
    """A new file that is locked while it is written, counts and hashes what it gets, and is flushed to the disk.

    Leaving the ``with`` block without an error flushes; ``close`` gives up the lock, which the system also does
    when the process ends. Raises ``OSError``.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("xb", buffering=1 << 16)
        self._digest, self._size = hashlib.sha256(), 0
        # Some network file systems have no locks; who looks for a lock then goes by age.
        with suppress(OSError):
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def write(self, content: bytes | memoryview) -> None:
        """Append bytes."""
        view = memoryview(content)
        for start in range(0, len(view), _CHUNK):
            part = view[start : start + _CHUNK]
            self._digest.update(part)
            self._file.write(part)
            self._size += len(part)

    @property
    def sum(self) -> Sum:
        """Size and hash of what was written so far."""
        return Sum(self._size, self._digest.hexdigest())

    def close(self) -> None:
        """Close the file and give up its lock."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._file.flush()
            os.fsync(self._file.fileno())


def file_sum(path: Path) -> Sum:
    """Return size and SHA-256 of a file. Raises ``OSError``."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
        return Sum(file.tell(), digest.hexdigest())


def sync_folder(path: Path) -> None:
    """Make names that were added to, removed from or changed in a folder durable. Raises ``OSError``."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    except OSError as error:
        # Some file systems cannot flush a folder, and say so with one of these.
        if error.errno not in {errno.EINVAL, errno.ENOTSUP}:
            raise
    finally:
        os.close(handle)


def is_locked(path: Path) -> bool | None:
    """Whether a living process holds the lock of a file; ``None`` where the file system cannot tell.

    A file that is not there is not locked.
    """
    try:
        with path.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    except OSError:
        return None
    return False
