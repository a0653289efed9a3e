"""Temporary files of what a rank starts: in a folder that goes when the rank does, however it ends."""

from multiprocessing.process import current_process
from pathlib import Path
from typing import Any


def kept_in(folder: Path) -> None:
    """Let multiprocessing put its sockets and files into ``folder``, in this process and in those that it starts.

    By itself it makes a folder that only an orderly exit removes, and ranks are mostly killed. The files lie in
    ``folder`` itself: the path of a socket may be no longer than some hundred bytes.
    """
    process: Any = current_process()
    process._config["tempdir"] = str(folder)  # there is no public way
