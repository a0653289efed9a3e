"""Who hears of what happens in a run, in the process that called for it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kway.devices.terminal import redraws
from kway.jobs.arguments import functions_of, truth
from kway.report.shown import Shown
from kway.trackers.chosen import trackers_of
from kway.trackers.following import Following
from kway.world import StopRequest

Callback = Callable[[str, dict[str, Any]], None]


@dataclass
class Listeners:
    """Hands a run's events to ``callbacks``. ``seen``: their names; ``begun``: the saves begun since ``stop``;
    ``told``: what was said of the run beside what its ranks say.
    """

    callbacks: tuple[Callback, ...]
    stop: StopRequest
    seen: set[str] = field(default_factory=set)
    begun: list[int] = field(default_factory=list)
    told: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        """Warn of something, and keep it for the record."""
        self.told.append(text)
        self({"event": "warning", "text": text})

    def say(self, text: str) -> None:
        """Tell what goes on before the run begins."""
        self({"event": "notice", "text": text})

    def __call__(self, event: dict[str, Any]) -> None:
        """Hand an event to all."""
        name = event["event"]
        self.seen.add(name)
        if name == "checkpoint" and self.stop.by:
            self.begun.append(event["step"])
        for callback in self.callbacks:
            callback(name, {key: value for key, value in event.items() if key != "event"})


def listeners(callbacks: Any, progress: Any) -> Listeners:
    """Return the user's callbacks, and what shows progress where it is wanted. Raises ``UsageError``."""
    shown = (Shown(redraws),) if truth("progress", progress) else ()
    return Listeners((*functions_of("callbacks", callbacks), *shown), StopRequest())


@contextmanager
def followed(tell: Listeners, trackers: Any, out: Path | str | None) -> Iterator[None]:
    """Let trackers hear what happens in the block, in a run whose files go to ``out``; end them and what is shown.

    Raises ``UsageError`` for what is no tracker.
    """
    try:
        with Following(trackers_of(trackers, out), tell.note) as following:
            tell.callbacks += (following,)
            yield
    finally:
        for callback in tell.callbacks:
            if isinstance(callback, Shown):
                callback.close()
