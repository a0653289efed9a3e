"""What an experiment is, what it is given, and where the experiments are.

An experiment is data: a file in ``experiments/`` with an ``EXPERIMENT``, found by its name. A new one is a new file;
command, record, cache, table and pictures know of it by themselves.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any, Protocol

import torch

from kway.errors import UsageError
from kway.measuring.figure import Figure, Maker
from kway.measuring.limits import Limits
from kway.measuring.timer import Candidate, Clock, Policy, Reading, Timer, Work
from kway.measuring.work import computed
from kway.registry import modules_of, unknown

_FOLDER = "kway.measuring.experiments"
Sizes = Mapping[str, Any]


class OnRanks(Protocol):
    """Calls ``task(context, *arguments)`` on one rank for each of ``device_set``; returns the results by rank.

    The task and what it returns travel between processes; ``context.world`` says where it is.
    """

    def __call__(self, device_set: Sequence[str], task: Callable[..., Any], *arguments: Any) -> list[Any]: ...


@dataclass
class Bench:
    """What an experiment is given.

    ``devices``: torch device strings to measure, each once, ``"cpu"`` first; ``cpu_ranks``: how many CPU ranks it may
    use at most; ``sizes``: those of the experiment, ``quick`` or not; ``policy``: with the budget of the whole
    experiment, of which each set of candidates gets a part; ``limits`` of the hardware; ``on_ranks`` starts ranks.
    ``readings``, ``notes``: what came up, for the record.
    """

    experiment: str
    devices: tuple[str, ...]
    sizes: Sizes
    policy: Policy
    limits: Limits
    quick: bool = False
    cpu_ranks: int = 1
    on_ranks: OnRanks | None = None
    clock: Clock = time.perf_counter
    readings: list[Reading] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def gpus(self) -> tuple[str, ...]:
        """The GPUs to measure."""
        return tuple(device for device in self.devices if torch.device(device).type != "cpu")

    def time(self, candidates: Sequence[Candidate], device: str, part: float) -> Reading:
        """Time a set of candidates, beside a reference workload on ``device``, within ``part`` of the budget."""
        policy = replace(self.policy, seconds=self.policy.seconds * part)
        reading = Timer(policy, self.clock).time(candidates, reference(device))
        self.readings.append(reading)
        return reading

    def maker(self, *readings: Reading) -> Maker:
        """Return what makes the figures of readings."""
        return Maker(self.experiment, max((reading.drift for reading in readings), default=0.0))


@dataclass(frozen=True)
class Experiment:
    """``needs``: types of torch devices without which there is nothing to measure; ``ranks``: whether it starts some.

    ``quick`` and ``full``: sizes by name, for ``run``; ``quick_s`` and ``full_s``: its budget, for one GPU or none.
    ``run`` returns the figures. ``version`` is raised where figures mean something else than before.
    """

    name: str
    summary: str
    run: Callable[[Bench], list[Figure]]
    quick: Sizes
    full: Sizes
    quick_s: float = 5.0
    full_s: float = 60.0
    needs: tuple[str, ...] = ("cpu",)
    order: int = 100
    version: int = 1

    def lacks(self, devices: Sequence[str]) -> str:
        """Say what it needs and these devices are not; ``""`` where it can be done."""
        missing = [kind for kind in self.needs if not any(device.startswith(kind) for device in devices)]
        return f"it needs a device of type {' and '.join(missing)}" if missing else ""


def experiments() -> dict[str, Experiment]:
    """Return every experiment by name, in their order."""
    found = (import_module(f"{_FOLDER}.{name}").EXPERIMENT for name in modules_of(_FOLDER))
    return {each.name: each for each in sorted(found, key=lambda each: (each.order, each.name))}


def chosen(only: Any) -> list[Experiment]:
    """Return the experiments that ``only`` names, by commas or in a list; all for ``None``. Raises ``UsageError``."""
    table = experiments()
    if only is None:
        return list(table.values())
    names = [part.strip() for part in only.split(",")] if isinstance(only, str) else list(only)
    for name in names:
        if name not in table:
            raise unknown("experiment", str(name), table)
    if not names:
        raise UsageError(
            "no experiment is named", f"known are {', '.join(table)}", "name one, or leave it out"
        )
    return [experiment for experiment in table.values() if experiment.name in names]


def reference(device: str) -> Work:
    """Return a workload that tells a change of the machine from one of a candidate: a product of small matrices."""
    size = 256 if torch.device(device).type == "cpu" else 2048
    generator = torch.Generator(device).manual_seed(0)
    a, b = (torch.randn(size, size, device=device, generator=generator) for _ in range(2))
    out = torch.empty_like(a)
    return computed(lambda: torch.mm(a, b, out=out), device)
