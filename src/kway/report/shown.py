"""A run's progress where this process shows things: the cell of a notebook, a terminal, or a log."""

import sys
from collections.abc import Callable, Mapping
from typing import Any, TextIO, cast

from kway.report.notebook import COLUMNS, Cell, in_notebook
from kway.report.progress import Progress


class Shown:
    """A callback of ``kway.train`` that shows how far the run is, from its first event until ``close``.

    ``redraws``: whether a line on a stream can be drawn again in place; asked at the first event.
    """

    def __init__(self, redraws: Callable[[TextIO], bool]) -> None:
        self._redraws = redraws
        self._cell: Cell | None = None
        self._progress: Progress | None = None

    def __call__(self, event: str, record: Mapping[str, Any]) -> None:
        """Show one event."""
        if self._progress is None:
            self._progress = self._here()
        self._progress({"event": event, **record})

    def close(self) -> None:
        """Leave what was shown complete. Safe to call twice."""
        if self._progress is not None:
            self._progress.close()
        if self._cell is not None:
            self._cell.settle()

    def _here(self) -> Progress:
        if not in_notebook():
            return Progress(sys.stdout, live=self._redraws(sys.stdout))
        self._cell = Cell()
        return Progress(cast(TextIO, self._cell), live=True, width=lambda: COLUMNS)
