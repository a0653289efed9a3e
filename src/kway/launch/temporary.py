"""Temporary files: of a job, and of what its ranks start. They lie in folders that go however it all ends."""

import errno
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.process import current_process
from pathlib import Path
from typing import Any

from kway.errors import UsageError

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS}
_DO = "set TMPDIR to a folder with room"


class NoRoomError(UsageError):
    """The folder for temporary files takes no more: the machine's fault, and not that of what was to be written."""


def check_temporary() -> None:
    """Raise ``NoRoomError`` where Python finds no folder for temporary files that it can write into."""
    with _found():
        tempfile.gettempdir()


def made_folder() -> Path:
    """Make a folder that the caller removes. Raises ``NoRoomError``."""
    with _found():
        return Path(tempfile.mkdtemp(prefix="kway-"))


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Yield a folder that is there while the block runs. Raises ``NoRoomError``."""
    folder = made_folder()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def needs_room(folder: Path, size: int | None = None) -> Iterator[None]:
    """Turn a disk that is full while the block writes ``size`` bytes into ``folder`` into ``NoRoomError``."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        room = [] if size is None else [f"{size} bytes are to be written"]
        with suppress(OSError):
            room.append(f"{shutil.disk_usage(folder).free} bytes are free")
        reason = ", ".join([error.strerror or str(error), *room])
        raise NoRoomError(f"the temporary folder {folder} cannot take the job's data", reason, _DO) from None


def kept_in(folder: Path) -> None:
    """Let multiprocessing put its sockets and files into ``folder``, in this process and in those that it starts.

    By itself it makes a folder that only an orderly exit removes, and ranks are mostly killed. The files lie in
    ``folder`` itself: the path of a socket may be no longer than some hundred bytes.
    """
    process: Any = current_process()
    process._config["tempdir"] = str(folder)  # there is no public way


@contextmanager
def _found() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise NoRoomError(
            "no folder for temporary files can be written", error.strerror or str(error), _DO
        ) from None
