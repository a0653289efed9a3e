"""What an experiment works with: devices, sizes, a budget, a timer, and a way to start ranks."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from kway.measuring.figure import Figure, Maker
from kway.measuring.limits import Limits
from kway.measuring.timer import Candidate, Clock, Policy, Reading, Timer, Work
from kway.measuring.work import computed

Sizes = Mapping[str, Any]
# Calls ``task(context, *arguments)`` on one rank for each of a device set, in processes of their own, and returns the
# results by rank: ``on_ranks(["cpu", "cpu"], task, 1024)``. ``context.world`` says where a rank is.
OnRanks = Callable[..., list[Any]]


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
    use; ``sizes``: those of the experiment; ``policy``: with the seconds of the whole experiment, of which each set of
    candidates gets a part; ``limits`` of the hardware; ``on_ranks`` starts ranks, where that is possible.
    ``readings`` and ``notes`` fill up meanwhile, for the record.
    """

    experiment: str
    devices: tuple[str, ...]
    sizes: Sizes
    policy: Policy
    limits: Limits = field(default_factory=Limits)
    cpu_ranks: int = 1
    on_ranks: OnRanks | None = None
    clock: Clock = time.perf_counter
    readings: list[Reading] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def gpus(self) -> tuple[str, ...]:
        """The GPUs to measure."""
        return tuple(device for device in self.devices if device != "cpu")

    def part_of(self, device: str) -> float:
        """Return a device's part of the budget where all are measured: the CPU gets half, where it is not alone."""
        return (0.5 if device == "cpu" else 0.5 / len(self.gpus)) if self.gpus else 1.0

    def part(self, part: float) -> Policy:
        """Return the policy with ``part`` of the budget."""
        return replace(self.policy, seconds=self.policy.seconds * part)

    def time(self, candidates: Sequence[Candidate], device: str, part: float) -> Reading:
        """Time a set of candidates, beside a reference workload on ``device``, within ``part`` of the budget."""
        work = reference(device)
        work(1)  # a GPU loads its libraries now, which is no part of the budget
        reading = Timer(self.part(part), self.clock).time(candidates, work)
        self.readings.append(reading)
        return reading

    def measure(self, rows: Sequence[Row], device: str, part: float) -> list[Figure]:
        """Time rows as one set and return their figures, without those that were left out."""
        candidates = [Candidate(row.title, row.run, row.family, row.work) for row in rows]
        return self._made(rows, self.time(candidates, device, part))

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


def reference(device: str) -> Work:
    """Return a workload that tells a change of the machine from one of a candidate: a product of small matrices."""
    size = 256 if torch.device(device).type == "cpu" else 2048
    a, b = (normal(device, torch.float32, size, size) for _ in range(2))
    out = torch.empty_like(a)
    return computed(lambda: torch.mm(a, b, out=out), device)


def normal(device: str, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Return normally distributed numbers, always the same: how much power products take depends on the numbers."""
    generator = torch.Generator(device).manual_seed(0)
    return torch.randn(*shape, device=device, dtype=torch.float32, generator=generator).to(dtype)
