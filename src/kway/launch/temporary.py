"""Temporary files of what a rank starts: in a folder that goes when the rank does, however it ends."""

import sys
from multiprocessing.process import current_process
from pathlib import Path
from typing import Any


def cleared_quietly() -> None:
    """Have what loader workers of this process leave when it is killed removed without a warning.

    Python starts a process for that, which warns of what it had to remove. kway's own processes are killed as a matter
    of course, and the user can do nothing about it; not for a process of the user's own.
    """
    sys.warnoptions.append("ignore:resource_tracker:UserWarning")  # what it starts inherits them


def kept_in(folder: Path) -> None:
    """Let multiprocessing put its sockets and files into ``folder``, in this process and in those that it starts.

    By itself it makes a folder that only an orderly exit removes, and ranks are mostly killed. The files lie in
    ``folder`` itself: the path of a socket may be no longer than some hundred bytes.
    """
    process: Any = current_process()
    process._config["tempdir"] = str(folder)  # there is no public way
