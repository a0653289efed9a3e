"""Which trackers a run has: named, or handed in."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kway.errors import UsageError
from kway.registry import known
from kway.trackers.event_files import tensorboard
from kway.trackers.protocol import Tracker
from kway.trackers.services import mlflow, wandb

# Within the folder of a run.
EVENTS = "tensorboard"
_METHODS = ("begin", "log", "end")


def _in_the_folder(out: Path | str | None) -> Tracker:
    if out is None:
        raise UsageError(
            "tracker tensorboard without out",
            "its event files go to the run's folder",
            "name one with out=, or pass kway.trackers.tensorboard(folder)",
        )
    return tensorboard(Path(out) / EVENTS)


NAMED: Mapping[str, Callable[[Path | str | None], Tracker]] = {
    "tensorboard": _in_the_folder,
    "wandb": lambda out: wandb(),
    "mlflow": lambda out: mlflow(),
}


def trackers_of(given: Any, out: Path | str | None) -> tuple[Tracker, ...]:
    """Return the trackers that ``given`` lists, names or objects, for a run whose files go to ``out``.

    Raises ``UsageError`` for what is no tracker, and for a named one whose package is missing.
    """
    if isinstance(given, str) or not hasattr(given, "__iter__"):
        raise UsageError(
            f"trackers={given!r}", "it must be a list of names or trackers", 'pass ["tensorboard"], say'
        )
    given = list(given)
    found = tuple(_one(place, item, out) for place, item in enumerate(given))
    for place, tracker in enumerate(found):
        named_before = isinstance(given[place], str) and given[place] in given[:place]
        if named_before or any(tracker is other for other in found[:place]):
            raise UsageError(
                f"trackers[{place}] is there twice", "a tracker follows one run", "leave one out"
            )
    return found


def _one(place: int, item: Any, out: Path | str | None) -> Tracker:
    if isinstance(item, str):
        return known("tracker", item, NAMED, "an object with begin, log and end")(out)
    lacks = [name for name in _METHODS if not callable(getattr(item, name, None))]
    if isinstance(item, type) or lacks:
        what = f"the class {item.__name__}" if isinstance(item, type) else f"of type {type(item).__name__}"
        raise UsageError(
            f"trackers[{place}] is {what}",
            "a tracker has the methods begin(config), log(metrics, step) and end(status)",
            "pass an object of the class" if isinstance(item, type) else f"it lacks {', '.join(lacks)}",
        )
    return item  # type: ignore[no-any-return]
