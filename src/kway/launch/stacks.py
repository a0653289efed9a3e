"""Where in its code a rank is: asked for by a signal, answered even while it is stuck outside of Python.

The answer is written by a handler in C that waits for nothing, neither the interpreter nor what the rank waits for.
"""

import contextlib
import faulthandler
import linecache
import os
import re
import signal
import time
from pathlib import Path

from kway.launch.own_frames import OWN

_SIGNAL = getattr(signal, "SIGUSR2", None)
_POLL_S = 0.02
_THREADS = re.compile(r"^(?:Current thread|Thread) 0x.*$", re.MULTILINE)
_FRAME = re.compile(r'  File "(.*)", line (\d+|\?\?\?) in (.*)')


def _file(folder: Path, rank: int) -> Path:
    return folder / f"stack-{rank}"


def answer_in(folder: Path, rank: int) -> None:
    """Let this process answer in a file of ``folder``. Nothing where its user handles the signal, SIGUSR2."""
    if _SIGNAL is None or signal.getsignal(_SIGNAL) is not signal.SIG_DFL:
        return
    with contextlib.suppress(OSError):
        # The handler holds the file open.
        faulthandler.register(_SIGNAL, _file(folder, rank).open("ab"), all_threads=True)


def ask(pid: int, folder: Path, rank: int, patience: float = 2.0) -> str:
    """Return the stacks of all threads of a rank as it wrote them, or ``""`` where it does not answer."""
    file = _file(folder, rank)
    if _SIGNAL is None or not file.exists():
        return ""
    size = file.stat().st_size
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, _SIGNAL)
    deadline = time.monotonic() + patience
    found = b""
    while time.monotonic() < deadline:
        time.sleep(_POLL_S)
        before, found = found, file.read_bytes()[size:]
        if found and found == before:
            break
    return found.decode(errors="replace")


def readable(dump: str) -> str:
    """Turn the main thread of a dump into a traceback as Python shows one, the innermost call last.

    Frames of the launcher itself are left out.
    """
    # The main thread is the oldest, and the oldest comes last.
    frames = _FRAME.findall(_THREADS.split(dump)[-1])[::-1]
    while len(frames) > 1 and (frames[0][0].startswith("<") or frames[0][0] in OWN):
        frames = frames[1:]
    frames = [frame for frame in frames if not frame[0].startswith("<frozen importlib")]
    lines = []
    for file, number, function in frames:
        lines.append(f'  File "{file}", line {number}, in {function}')
        code = linecache.getline(file, int(number)).strip() if number.isdigit() else ""
        if code:
            lines.append(f"    {code}")
    return "\n".join(lines)


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped, by SIGSTOP or a debugger. False where the system does not tell."""
    return _state(pid) in {"T", "t"}


def has_ended(pid: int) -> bool:
    """Whether a child has ended and was not taken away yet. False where the system does not tell."""
    return _state(pid) in {"Z", "X"}


def _state(pid: int) -> str:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return text.rpartition(")")[2].split()[0]
