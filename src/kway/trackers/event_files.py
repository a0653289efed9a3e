"""Event files that TensorBoard reads, written by ``torch.utils.tensorboard``."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kway.job import check_path
from kway.trackers.protocol import Tracker, needs


class EventFiles:
    """Writes to ``folder``, from when the run begins."""

    def __init__(self, folder: Path | str) -> None:
        self._folder = folder
        self._writer: Any = None

    def begin(self, config: Mapping[str, Any]) -> None:
        """Open a file. Points that an earlier part of the run wrote beyond where this one goes on are hidden."""
        from torch.utils.tensorboard.writer import SummaryWriter

        resumed = config.get("resumed_from_step")
        self._writer = SummaryWriter(str(self._folder), purge_step=None if resumed is None else resumed + 1)
        rows = [f"| {name} | {str(value).replace('|', '&#124;')} |" for name, value in config.items()]
        self._writer.add_text("config", "\n".join(["| setting | value |", "|---|---|", *rows]))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Write points. They reach the file within two minutes, or at the end."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def end(self, status: str) -> None:
        """Write what is left, and how the run ended; nothing where no file could be opened."""
        if self._writer is None:
            return
        try:
            self._writer.add_text("status", status)
        finally:
            self._writer.close()


def tensorboard(folder: Path | str) -> Tracker:
    """Return a tracker that writes event files to ``folder``, which is made.

    Raises ``UsageError`` where TensorBoard is not installed.
    """
    check_path("folder", folder)
    needs("tensorboard", "tensorboard")
    return EventFiles(folder)
