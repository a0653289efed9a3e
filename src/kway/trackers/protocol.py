"""What a tracker is: three methods, called in order, in a thread of its own."""

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any, Protocol

from kway.errors import UsageError

# How a run can end: with all its steps; asked to, by a signal or Ctrl-C; with an error.
FINISHED, STOPPED, FAILED = "finished", "stopped", "failed"


class Tracker(Protocol):
    """Takes in the configuration and the figures of one run. What it raises ends its own part, never the run."""

    def begin(self, config: Mapping[str, Any]) -> None:
        """Start. ``config``: the job and the place of the run by name, as plain values; none of them is ``None``."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Take figures by name, after ``step`` optimizer steps of the run. Steps never become smaller."""

    def end(self, status: str) -> None:
        """End, when the last figure is in: ``"finished"``, ``"stopped"`` or ``"failed"``.

        Called as well where ``begin`` or ``log`` raised: there may be nothing to end, or half of it.
        """


def needs(package: str, install: str) -> None:
    """Raise ``UsageError`` where ``package`` cannot be imported. It is not imported here."""
    if find_spec(package) is None:
        raise UsageError(
            f"tracker {package}", f"the package {package} is not installed here", f"pip install {install}"
        )
