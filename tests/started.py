"""Which processes are started while something runs: all of them, however short they live."""

import _posixsubprocess
import os
import subprocess
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

# What starts a process from Python; what starts one from C shows as a child.
STARTERS = (
    (os, "fork"),
    (os, "forkpty"),
    (os, "posix_spawn"),
    (os, "posix_spawnp"),
    (os, "system"),
    (subprocess, "_fork_exec"),
    (_posixsubprocess, "fork_exec"),
)
LOOK_S = 0.005


@contextmanager
def started() -> Iterator[list[str]]:
    """Yield a list that gets a line for each process that this one starts while open, from whichever thread.

    Every function of Python that starts one is seen as it is called. A thread looks at the children of this process
    beside, every five milliseconds, for those that other code has started; all of them are listed at the end.
    """
    calls: list[str] = []
    before, seen, done = children(), set[int](), threading.Event()

    def looks() -> None:
        while not done.wait(LOOK_S):
            seen.update(children() - before)

    def noted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any, **more: Any) -> Any:
            caller = traceback.extract_stack(limit=2)[0]
            calls.append(f"{name}, called in {caller.filename}:{caller.lineno}")
            return call(*given, **more)

        return run

    thread = threading.Thread(target=looks, daemon=True)
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in STARTERS:
            if hasattr(owner, name):
                patch.setattr(owner, name, noted(name, getattr(owner, name)))
        thread.start()
        try:
            yield calls
        finally:
            seen.update(children() - before)
            done.set()
            thread.join()
            calls += [f"process {child}, seen among the children" for child in sorted(seen)]


def children() -> set[int]:
    """Return the processes that this one has started, and that nobody has waited for yet."""
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        # A thread may end meanwhile.
        with suppress(OSError):
            found.update(map(int, (task / "children").read_text().split()))
    return found
