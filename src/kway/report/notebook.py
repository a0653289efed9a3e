"""A notebook's cell as a stream: one output that is updated, so that a long run leaves a few lines and no flood."""

import io
import re
import sys
import time
from collections import deque
from collections.abc import Callable
from importlib import import_module
from typing import Any

# The front end redraws the whole output each time.
UPDATE_S = 0.5
FIRST, LAST = 3, 12
COLUMNS = 110


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook. IPython is not imported to find out."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return getattr(shell, "kernel", None) is not None


class Cell(io.TextIOBase):
    """Shows what is written to it in one output of the running cell: the first 3 lines and the last 12.

    A carriage return begins the open line anew. ``show(text)`` puts the output there and returns what replaces its
    text; ``clock`` returns seconds. What is written shows at the next ``flush`` that is 0.5 s after the one before,
    and at ``settle``.
    """

    def __init__(
        self,
        show: Callable[[str], Callable[[str], None]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._show = show or _displayed
        self._clock = clock
        self._first: list[str] = []
        self._last: deque[str] = deque(maxlen=LAST)
        self._left_out = 0
        self._open = ""
        self._update: Callable[[str], None] | None = None
        self._shown, self._at = "", float("-inf")

    def write(self, text: str) -> int:
        """Take in ``text``."""
        for part in re.split("([\r\n])", text):
            if part == "\n":
                self._keep(self._open.rstrip())
            self._open = "" if part in ("\r", "\n") else self._open + part
        return len(text)

    def flush(self) -> None:
        """Show what was written, unless that was done a moment ago."""
        if self._clock() - self._at >= UPDATE_S:
            self.settle()

    def settle(self) -> None:
        """Show what was written."""
        text = self.text
        if text == self._shown:
            return
        if self._update is None:
            self._update = self._show(text)
        else:
            self._update(text)
        self._shown, self._at = text, self._clock()

    @property
    def text(self) -> str:
        """What there is to show."""
        gap = [f"... ({self._left_out:,} lines left out here)"] if self._left_out else []
        lines = [*self._first, *gap, *self._last, self._open.rstrip()]
        return "\n".join(lines).rstrip()

    def _keep(self, line: str) -> None:
        if len(self._first) < FIRST:
            self._first.append(line)
            return
        self._left_out += len(self._last) == LAST
        self._last.append(line)


def _displayed(text: str) -> Callable[[str], None]:
    display: Any = import_module("IPython.display")
    handle = display.display({"text/plain": text}, raw=True, display_id=True)
    return lambda newer: handle.update({"text/plain": newer}, raw=True)
