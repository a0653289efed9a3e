"""What an experiment works with: devices, sizes, a budget, a timer, and a way to start ranks."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from kway.measuring.budget import Budget, Purse
from kway.measuring.figure import Figure, Maker
from kway.measuring.limits import Limits
from kway.measuring.reference import connected, reference
from kway.measuring.timer import Candidate, Clock, Policy, Reading, Timer, Work
from kway.measuring.work import Call

Sizes = Mapping[str, Any]
By = Callable[[Policy], Policy]
# What ranks do within a budget of seconds is given up after so many times as long and a while: first calls are added
# to a budget, and a back end that hangs would hold up all the rest.
PATIENCE, WHILE_S = 2.0, 20.0


class OnRanks(Protocol):
    """Calls tasks on one rank for each device of a set, in processes of their own that stay for the next task.

    ``on_ranks(["cpu", "cpu"], task, 1024)`` calls ``task(context, 1024)`` on each and returns the results by rank;
    ``context.world`` says where a rank is. ``start`` calls a task where there are no such ranks yet.
    """

    def __call__(
        self,
        device_set: Sequence[str],
        task: Callable[..., Any],
        *arguments: Any,
        limit_s: float | None = None,
    ) -> list[Any]:
        """See the class. ``limit_s``: it raises ``RankError`` where ranks have not come to an end by then."""

    def start(self, device_set: Sequence[str], task: Callable[..., Any]) -> None:
        """See the class."""


@dataclass(frozen=True)
class Row:
    """A candidate, and the figure that its samples make: ``value`` turns the seconds of one repeat into ``unit``.

    ``run``, ``family`` and ``work``: see ``Candidate``. The rest: see ``Figure``.
    """

    name: str
    parameters: dict[str, Any]
    run: Work
    unit: str = "s"
    value: Callable[[float], float] = lambda seconds: seconds
    limit: float | None = None
    notes: tuple[str, ...] = ()
    family: str = ""
    work: float = 0.0

    @property
    def title(self) -> str:
        """Name and parameters in one line."""
        return f"{self.name} ({', '.join(f'{key} {value}' for key, value in self.parameters.items())})"


@dataclass
class Bench:
    """What an experiment is given.

    ``devices``: torch device strings to measure, each once, ``"cpu"`` first; ``cpu_ranks``: how many CPU ranks it may
    use; ``sizes``: those of the experiment; ``policy``: how candidates are timed, with seconds for what the CPU does
    and as many for what GPUs do, until ``spend`` says otherwise; ``limits`` of the hardware; ``alike``: by GPU that is
    not measured in full, the one of its kind that is; ``on_ranks`` starts ranks, where that is possible. ``readings``
    and ``notes`` fill up meanwhile, for the record.
    """

    experiment: str
    devices: tuple[str, ...]
    sizes: Sizes
    policy: Policy
    limits: Limits = field(default_factory=Limits)
    alike: Mapping[str, str] = field(default_factory=dict)
    cpu_ranks: int = 1
    on_ranks: OnRanks | None = None
    clock: Clock = time.perf_counter
    readings: list[Reading] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.spend(Budget(self.policy.seconds, self.policy.seconds))

    def spend(self, budget: Budget) -> None:
        """Let the experiment take as long, from now on."""
        self._purses = {"cpu": Purse(budget.cpu), "cuda": Purse(budget.gpu)}

    @property
    def gpus(self) -> tuple[str, ...]:
        """The GPUs to measure."""
        return tuple(device for device in self.devices if device != "cpu")

    def share(self, device: str, part: float) -> float:
        """Return the seconds of a set on ``device`` that was planned with ``part`` of those of its kind of device."""
        return self._purse(device).share(part)

    def _purse(self, device: str) -> Purse:
        return self._purses[torch.device(device).type]

    def time(
        self, candidates: Sequence[Candidate], device: str, part: float, by: By = lambda policy: policy
    ) -> Reading:
        """Time a set of candidates, beside a reference workload on ``device``, within ``part`` of its budget.

        ``by`` turns the policy, with the seconds that there are, into that of this set.
        """
        work = reference(device)
        work(1)  # a GPU loads its libraries now, which is no part of the budget
        policy = by(replace(self.policy, seconds=self.share(device, part)))
        reading = Timer(policy, self.clock).time(candidates, work)
        self._purse(device).pay(part, reading.seconds)
        self.readings.append(reading)
        return reading

    def on(self, devices: Sequence[str], part: float, task: Callable[..., Any], *arguments: Any) -> Any:
        """Call ``task(context, *arguments, policy, asked_at)`` on one rank for each device, within ``part`` of the
        budget; return the result of rank 0. See ``in_step.Remaining`` for ``asked_at``.
        """
        assert self.on_ranks is not None
        policy = replace(self.policy, seconds=self.share(devices[0], part))
        begun = self.clock()
        limit_s = PATIENCE * policy.seconds + WHILE_S
        found = self.on_ranks(list(devices), task, *arguments, policy, time.time(), limit_s=limit_s)[0]
        self._purse(devices[0]).pay(part, self.clock() - begun)
        return found

    def started(self, *device_sets: Sequence[str]) -> Call:
        """Return what starts a rank for each device of the sets, where they are not there yet, and waits for them."""
        ranks = self.on_ranks

        def wait() -> None:
            for devices in device_sets:
                if ranks is not None:
                    ranks.start(list(devices), connected)

        return wait

    def measure(
        self, rows: Sequence[Row], device: str, part: float, by: By = lambda policy: policy
    ) -> list[Figure]:
        """Time rows as one set and return their figures, without those that were left out. ``by``: see ``time``."""
        candidates = [Candidate(row.title, row.run, row.family, row.work) for row in rows]
        return self._made(rows, self.time(candidates, device, part, by))

    def figures(self, rows: Sequence[Row], reading: Reading) -> list[Figure]:
        """Return the figures of rows that ranks have timed as one set, by their titles; ``readings`` gets theirs."""
        self.readings.append(reading)
        return self._made(rows, reading)

    def _made(self, rows: Sequence[Row], reading: Reading) -> list[Figure]:
        make = self.maker(reading)
        return [
            make.timed(row.name, row.parameters, row.unit, timing.raw, row.value, row.limit, row.notes)
            for row in rows
            if (timing := reading.timings.get(row.title)) is not None
        ]

    def maker(self, *readings: Reading) -> Maker:
        """Return what makes the figures of readings."""
        return Maker(self.experiment, max((reading.drift for reading in readings), default=0.0))
