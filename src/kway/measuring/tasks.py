"""What processes are given to do, element by element; no torch, so that a new process has little to load.

``compute``: about a microsecond of arithmetic an element, in Python. ``wait``: a request for each 250 elements, which
answers after a tenth of a millisecond, as a disk or another machine would; no processor is needed meanwhile.
"""

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from multiprocessing import parent_process
from typing import Any

Task = Callable[[Sequence[float]], list[float]]

REQUEST = 250
ANSWER_S = 1e-4
_ROUNDS = 6


def compute(values: Sequence[float]) -> list[float]:
    """Return a function of each value that takes some arithmetic."""
    found = []
    for value in values:
        each = value
        for _ in range(_ROUNDS):
            each = math.sqrt(each * each + 1.0)
        found.append(each)
    return found


def wait(values: Sequence[float]) -> list[float]:
    """Return the values, after one wait for each request that they take."""
    for _ in range(0, len(values), REQUEST):
        time.sleep(ANSWER_S)
    return list(values)


TASKS: dict[str, Task] = {"compute-bound": compute, "I/O-bound": wait}


def cut(values: Sequence[float], parts: int) -> list[Sequence[float]]:
    """Cut values into contiguous parts of balanced sizes, none of them empty."""
    parts = min(parts, len(values))
    edges = [index * len(values) // parts for index in range(parts + 1)]
    return [values[start:stop] for start, stop in pairwise(edges)]


def answer(task: Task, values: Sequence[float], to: Any) -> None:
    """Do one task in a process of its own and send what comes out of it."""
    end_with_parent()
    to.send(task(values))
    to.close()


def end_with_parent() -> None:
    """End this process when the one that asked for it is gone, however it ended."""
    # Ctrl-C is for the process that asked.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_watch, daemon=True).start()


def _watch() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGKILL)
