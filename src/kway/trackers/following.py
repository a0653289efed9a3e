"""From a run's events to its trackers: what they begin with, which figures they get, how they end."""

import copy
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from kway.errors import StoppedError
from kway.trackers.protocol import FAILED, FINISHED, STOPPED, Tracker
from kway.trackers.told import Told

# How long a run waits for what trackers have still to send. One that was asked to stop may be killed soon.
WAIT_S = 60.0
WAIT_ENDED_S = 10.0
_OF_EPOCHS = ("seconds", "samples_per_s", "lr")


class Following:
    """A callback of a run that tells its trackers, and ends them when the block ends that it is the context of.

    ``warn`` is called with a line for each tracker that fails, once, in the thread that events come in.
    """

    def __init__(
        self, trackers: Sequence[Tracker], warn: Callable[[str], None], wait_s: float = WAIT_S
    ) -> None:
        self._told = [Told(tracker) for tracker in trackers]
        self._warn = warn
        self._wait_s = wait_s
        self._begun = False
        self._last: dict[str, int] = {}

    def __call__(self, event: str, record: Mapping[str, Any]) -> None:
        """Tell the trackers of one event. See ``kway.train`` for events."""
        if event == "start" and not self._begun:
            self._begun = True
            config = config_of(record)
            self._all("begin", config)
        elif self._begun and (found := figures(event, record)):
            step = record["global_step"]
            # A run that was started again takes some steps a second time.
            if step > self._last.get(event, -1):
                self._last[event] = step
                self._all("log", found, step)
        elif event == "end":
            self.end(FINISHED)
        self._say()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End what is not ended."""
        stopped = isinstance(error, StoppedError) or not isinstance(error, Exception)
        self.end(FINISHED if error is None else STOPPED if stopped else FAILED)

    def end(self, status: str) -> None:
        """End the trackers, if any began. What comes later is told to nobody."""
        if not self._begun:
            return
        self._begun = False
        self._all("end", status)
        for told in self._told:
            told.close(self._wait_s if status == FINISHED else min(self._wait_s, WAIT_ENDED_S))
        self._say()
        self._told = []

    def _all(self, method: str, *arguments: Any) -> None:
        for told in self._told:
            # A copy each: what one changes is no other's, and each reads in a thread of its own.
            told.call(method, *copy.deepcopy(arguments))

    def _say(self) -> None:
        for told in self._told:
            if text := told.failure():
                self._warn(text)


def config_of(start: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of a run by name, from its event ``start``: the job beside where it runs."""
    named = {**{name: value for name, value in start.items() if name != "job"}, **start["job"]}
    return {name: value for name, value in named.items() if value is not None}


def figures(event: str, record: Mapping[str, Any]) -> dict[str, float]:
    """Return the figures of an event under the names that trackers know them by; none for other events.

    ``train/`` is of single steps, ``validation/`` of held-out data, ``epoch/`` of whole epochs. Rates are samples a
    second, times seconds.
    """
    found: dict[str, Any] = {}
    if event == "step":
        found["train/loss"] = record["loss"]
        if record["seconds"]:
            found["train/samples_per_s"] = record["samples"] / record["seconds"]
    elif event == "validation":
        for name, value in record.items():
            if name not in ("epoch", "step", "global_step"):
                found[f"validation/{'loss' if name == 'validation_loss' else name}"] = value
    elif event == "epoch":
        for name, value in record.items():
            if name.startswith("train_") or name in _OF_EPOCHS:
                found[f"epoch/{name}"] = value
    return {
        name: float(value)
        for name, value in found.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
