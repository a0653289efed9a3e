"""What an experiment is, and where the experiments are.

An experiment is data: a file in ``experiments/`` with an ``EXPERIMENT``, found by its name. A new one is a new file;
command, record, cache, table and pictures know of it by themselves.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from kway.errors import UsageError
from kway.measuring.bench import Bench, Sizes
from kway.measuring.budget import Budget, Seconds
from kway.measuring.figure import Figure
from kway.measuring.names import FOLDER, names
from kway.measuring.work import Call
from kway.registry import unknown


def nothing(bench: Bench) -> Call:
    """Start nothing, and wait for nothing."""
    return lambda: None


@dataclass(frozen=True)
class Experiment:
    """``needs``: types of torch devices without which there is nothing to measure; ``order``: among experiments.

    ``quick`` and ``full``: sizes by name, for ``run``, which returns the figures; ``quick_s`` and ``full_s``: seconds
    that it is expected to take. ``start``: starts what takes its time to be there, and returns what waits until it is;
    all are called before the first experiment measures. ``version`` is raised where figures mean something else than
    before.
    """

    name: str
    summary: str
    run: Callable[[Bench], list[Figure]]
    quick: Sizes
    full: Sizes
    quick_s: Seconds
    full_s: Seconds
    start: Callable[[Bench], Call] = nothing
    needs: tuple[str, ...] = ("cpu",)
    order: int = 100
    version: int = 1

    def sizes(self, quick: bool) -> Sizes:
        """Return the sizes to measure."""
        return self.quick if quick else self.full

    def budget(self, quick: bool, gpus: int) -> Budget:
        """Return the seconds that it is expected to take."""
        return (self.quick_s if quick else self.full_s).of(gpus)

    def lacks(self, devices: Sequence[str]) -> str:
        """Say what it needs and these devices are not; ``""`` where it can be done."""
        missing = [kind for kind in self.needs if not any(device.startswith(kind) for device in devices)]
        return f"it needs a device of type {' and '.join(missing)}" if missing else ""


def experiments() -> dict[str, Experiment]:
    """Return every experiment by name, in their order."""
    found = (import_module(f"{FOLDER}.{name}").EXPERIMENT for name in names())
    return {each.name: each for each in sorted(found, key=lambda each: (each.order, each.name))}


def chosen(only: Any) -> list[Experiment]:
    """Return the experiments that ``only`` names, by commas or in a list; all for ``None``. Raises ``UsageError``."""
    table = experiments()
    if only is None:
        return list(table.values())
    if not isinstance(only, str | Iterable):
        raise UsageError(
            f"only={only!r}", "it must name experiments", 'pass "compute,copies", or a list of such names'
        )
    wanted = [part.strip() for part in only.split(",")] if isinstance(only, str) else list(only)
    for name in wanted:
        if name not in table:
            raise unknown("experiment", str(name), table)
    if not wanted:
        raise UsageError(
            "no experiment is named", f"known are {', '.join(table)}", "name one, or leave it out"
        )
    return [experiment for experiment in table.values() if experiment.name in wanted]
