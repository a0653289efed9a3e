"""What a step of one candidate costs, while it is being added up: seconds by term, bytes by part."""

import math
from collections.abc import Collection
from dataclasses import dataclass, field

from kway.backends import backend_of
from kway.cost.beside import LARGE, RANKS, SMALL, slowdowns
from kway.cost.collectives import collective_s
from kway.cost.compute import RECORDS, backward_s, compute_s, fixed_s, line_error, spread_of
from kway.cost.memory import memory_of
from kway.cost.skew import side_by_side, waiting_s
from kway.measurements import Measurements
from kway.workload import Workload

COMPUTE, LAUNCH, INPUT, OPTIMIZER = "compute", "launch", "input", "optimizer"
BESIDE, WAITING = "ranks beside each other", "waiting for the slowest rank"


@dataclass
class Estimate:
    """A step on ``devices`` (as torch spells them), of which each computes ``samples`` with ``threads`` CPU threads.

    ``batch_size``: global. ``shards``: of level bits. ``several``: whether a device has others to work with. ``terms``:
    exposed seconds by name, whose sum is the step; ``memory``: bytes of one device by part. Axes add to both, or change
    what is there. ``fixed``: of what a device takes by itself the seconds that do not fall with its samples, and the
    largest relative residual of the line that says so; ``None``: one share alone was timed. ``notes``: lines for the
    user.
    """

    workload: Workload
    measurements: Measurements | None
    devices: tuple[str, ...]
    step_kind: str
    batch_size: int
    samples: int
    threads: int
    shards: int = 8
    terms: dict[str, float] = field(default_factory=dict)
    memory: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    fixed: tuple[float, float] | None = None

    @property
    def several(self) -> bool:
        """Whether a device has others to work with."""
        return len(self.devices) > 1

    @property
    def on_cpu(self) -> bool:
        """Whether the devices are CPU ranks."""
        return not self.devices[0].startswith("cuda")

    @property
    def backend(self) -> str:
        """The back end through which the ranks talk."""
        return backend_of(self.devices)

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return math.fsum(self.terms.values())

    @property
    def memory_bytes(self) -> float:
        """Bytes that one device needs."""
        return math.fsum(self.memory.values())

    def add(self, term: str, seconds: float) -> None:
        """Add exposed seconds to a term."""
        self.terms[term] = self.terms.get(term, 0.0) + seconds

    def hold(self, part: str, size: float) -> None:
        """Add bytes of each device to a part of its memory."""
        self.memory[part] = self.memory.get(part, 0.0) + size

    def note(self, line: str) -> None:
        """Add a line for the user, once."""
        if line not in self.notes:
            self.notes.append(line)

    def collective_s(self, collective: str, ranks: int, size: float, after_work: bool = True) -> float:
        """Return the seconds of a collective of ``size`` bytes among ``ranks`` of the devices: see ``collective_s``.

        ``after_work``: on CPUs. On GPUs all collectives of a recorded step follow work that was queued before them, and
        those of others are launched one by one.
        """
        behind = after_work if self.on_cpu else self.step_kind in RECORDS
        return collective_s(self.measurements, self.backend, collective, ranks, size, behind)

    def part_s(self, part: str) -> float:
        """Return the seconds of a part of a step as each device takes it alone: see ``compute_s``."""
        own = self.workload, self.step_kind, self.samples, self.threads
        if part == "backward":
            return backward_s(*own, self.several)
        return compute_s(*own, part, self.several)

    def begin(self) -> None:
        """Add what each device takes and holds by itself, and what devices cost each other by being there.

        The whole step is what was timed; input and optimizer are told apart where they were. What does not fall with
        the share is ``launch``. Raises ``NotMeasuredError``.
        """
        rest = self.part_s("step")
        fixed = self._fixed_s("step")
        stays = 0.0
        for term in (INPUT, OPTIMIZER):
            if self.workload.timed(self.step_kind, term):
                seconds = min(self.part_s(term), rest)
                fixed -= self._fixed_s(term)
                stays += min(self._fixed_s(term), seconds)
                rest -= seconds
                self.add(term, seconds)
        launch = min(max(0.0, fixed), rest)
        self.add(LAUNCH, launch)
        self.add(COMPUTE, rest - launch)
        error = line_error(self.workload, self.step_kind, self.threads, self.several)
        self.fixed = None if error is None else (launch + stays, error)
        held = memory_of(self.workload, self.step_kind, self.samples, several=self.several)
        for part, size in held.items():
            self.hold(part, size)
        if not self.several:
            return
        if not self.workload.timed(self.step_kind, several=True):
            # What this machine has no such devices for, no profile of it shows.
            there = self.measurements is not None and self.measurements.is_estimate
            what_helps = (
                "plan on a machine with several GPUs, whose profile has it"
                if there
                else "profile for several"
            )
            self.note(
                f"what a device does for the others beside computing its share was not timed: {what_helps}"
            )
        if self.on_cpu:
            measured = slowdowns(self.measurements, RANKS, len(self.devices))
            bursts = 1.0 if measured else side_by_side(self.measurements, len(self.devices))
            self.slow_down(measured.get(LARGE, bursts), measured.get(SMALL, bursts))
        else:
            self.slow_down(1.0, 1.0)

    def slow_down(self, large: float, small: float, in_turns: Collection[str] = ()) -> None:
        """Let devices take so many times as long beside each other: to start operations ``small``, for the rest
        ``large``; set what that costs, and how long they wait for the slowest.

        ``in_turns``: terms of what devices do one after the other, which nothing slows down.
        """
        own = {
            term: seconds
            for term, seconds in self.terms.items()
            if term in (INPUT, OPTIMIZER, LAUNCH, COMPUTE) and term not in in_turns
        }
        launch = own.pop(LAUNCH, 0.0)
        rest = math.fsum(own.values())
        longer = (small - 1) * launch + (large - 1) * rest
        self.terms.pop(BESIDE, None)
        if longer > 0:
            self.terms[BESIDE] = longer
        deviation = spread_of(self.workload, self.step_kind, self.samples, self.threads, self.several)
        self.terms[WAITING] = waiting_s(launch + rest + longer, deviation, len(self.devices))

    def _fixed_s(self, part: str) -> float:
        return fixed_s(self.workload, self.step_kind, self.threads, part, self.several)
