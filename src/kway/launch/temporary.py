"""Temporary files: of a job, and of what its ranks start. They lie in folders that go however it all ends."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import current_process
from pathlib import Path
from typing import Any

from kway.errors import UsageError

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
