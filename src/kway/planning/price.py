"""What a candidate costs, as the planner sees it, and who says so."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import fsum

from kway.planning.candidates import Candidate


@dataclass(frozen=True)
class Price:
    """A step of one candidate. ``terms``: exposed seconds by name; ``memory``: bytes of one device by part.

    ``fixed``: seconds of it that do not fall with the samples of a device, and by which part the line that says so is
    off; ``None``: one share alone was timed.
    """

    terms: Mapping[str, float]
    memory: Mapping[str, int]
    notes: tuple[str, ...] = ()
    fixed: tuple[float, float] | None = None

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return fsum(self.terms.values())

    @property
    def memory_bytes(self) -> int:
        """Bytes that one device needs."""
        return sum(self.memory.values())


# ``pricer(candidate, global batch)``. Raises ``UsageError`` where what it would need was not measured.
Pricer = Callable[[Candidate, int], Price]
# Bytes that each device of a candidate has, or ``None`` where that is not known.
Room = Callable[[Candidate], int | None]


@dataclass(frozen=True)
class Scaling:
    """How the global batch follows from the number of devices: ``batch`` for all, or for each device (``weak``).

    ``samples``: of an epoch, of which no batch has more; ``None`` where nobody knows.
    """

    batch: int
    weak: bool = False
    samples: int | None = None

    def of(self, devices: int, batch: int | None = None) -> int:
        """Return the global batch on so many devices. ``batch``: in place of the own one, and never cut."""
        size = self.batch if batch is None else batch
        whole = size * devices if self.weak else size
        return whole if batch is not None or self.samples is None else min(whole, self.samples)

    @property
    def name(self) -> str:
        """``strong`` or ``weak``."""
        return "weak" if self.weak else "strong"
