"""Who may take how many seconds: GPUs what they need, the CPU what is left, and no set what another one has not used.

On a machine with GPUs the two have budgets of their own. What a slow CPU candidate takes, the CPU's other candidates
lack; no figure of a GPU is left out for it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

# A GPU's set may take this many times its planned seconds, where nobody needs them more.
PATIENCE = 3.0
# So many times they may take in any case: what was planned is a guess, and costs nothing where less is taken.
SLACK = 1.5
# To such a part the CPU's seconds shrink at most: less would measure nothing.
LEAST = 0.25


@dataclass(frozen=True)
class Seconds:
    """What an experiment is expected to take: on a machine without GPUs (``alone``), and on one with some: its
    candidates on the ``cpu``, those of the first GPU and of all GPUs together (``gpu``), and what each further GPU adds
    (``more``).
    """

    alone: float
    cpu: float = 0.0
    gpu: float = 0.0
    more: float = 0.0

    def of(self, gpus: int) -> "Budget":
        """Return the budget on a machine with so many GPUs."""
        if not gpus:
            return Budget(self.alone, 0.0)
        return Budget(self.cpu, self.gpu + self.more * (gpus - 1))


@dataclass(frozen=True)
class Budget:
    """Seconds for what the CPU does, and for what GPUs do."""

    cpu: float
    gpu: float


def allowed(planned: Sequence[Budget], left: float) -> Budget:
    """Return what the first of the ``planned`` ones may take, where ``left`` seconds are there for all of them.

    GPUs get what was planned for them and half as much again, whatever is left, and more where all others have enough.
    The CPU's seconds shrink with what is left beside those of the GPUs.
    """
    first = planned[0]
    cpu, gpu = (sum(getattr(each, kind) for each in planned) for kind in ("cpu", "gpu"))
    part = min(1.0, (left - gpu) / cpu) if cpu > 0 else 1.0
    spare = left - (gpu - first.gpu) - cpu
    return Budget(max(part, LEAST) * first.cpu, min(max(spare, SLACK * first.gpu), PATIENCE * first.gpu))


def expected(planned: Budget, given: Budget) -> float:
    """Return the seconds that an experiment takes, about, which ``allowed`` has ``given`` so much.

    What a GPU's set may take beyond its plan is for a plan that was wrong.
    """
    return min(planned.cpu, given.cpu) + min(planned.gpu, given.gpu)


class Purse:
    """The seconds of one kind of device within an experiment. What a set does not use, those after it may."""

    def __init__(self, seconds: float) -> None:
        self._left, self._parts = seconds, 1.0

    def share(self, part: float) -> float:
        """Return the seconds of a set that was planned with ``part`` of the whole."""
        return max(self._left, 0.0) * min(1.0, part / self._parts) if self._parts > 0 else 0.0

    def pay(self, part: float, seconds: float) -> None:
        """Take away what such a set has used."""
        self._left -= seconds
        self._parts = max(self._parts - part, 1e-9)
