"""Stops a run whose loss is no number, without making the device wait at every step."""

import math

import torch

from kway.errors import NonFiniteError
from kway.step.core import Outcome, check_calls


class LossWatch:
    """Collects the outcomes of steps and adds up their losses, weighted as the losses were.

    On a GPU the values are read back every ``every`` steps; on a CPU, where reading costs nothing, at once.
    """

    def __init__(self, device: torch.device, every: int = 50) -> None:
        self.every = 1 if device.type == "cpu" else every
        self._open: list[tuple[int, int, Outcome]] = []
        self._total, self._weight = 0.0, 0.0
        self.last: float | None = None

    def add(self, epoch: int, step: int, outcome: Outcome) -> None:
        """Take in the outcome of one step. Raises ``NonFiniteError``."""
        self._open.append((epoch, step, outcome))
        if len(self._open) >= self.every:
            self.check()

    def check(self) -> None:
        """Read back what is open. Raises ``NonFiniteError`` that names epoch, step and rank."""
        if not self._open:
            return
        rows = torch.stack(
            [torch.stack([o.loss.double(), o.weight.double()]) for _, _, o in self._open]
        ).tolist()
        for (epoch, step, outcome), (loss, weight) in zip(self._open, rows, strict=True):
            if not (math.isfinite(loss) and math.isfinite(weight)):
                raise _error(epoch, step, outcome, loss, weight)
            self._total += loss * weight
            self._weight += weight
            self.last = loss
        self._open.clear()

    def state(self) -> list[float | None]:
        """Return what later means depend on. Raises ``NonFiniteError``."""
        self.check()
        return [self._total, self._weight, self.last]

    def load(self, state: list[float | None]) -> None:
        """Go on from what ``state`` gave."""
        total, weight, self.last = state
        self._total, self._weight = total or 0.0, weight or 0.0

    def epoch_mean(self) -> float:
        """Return the mean loss since the last call, and start anew."""
        self.check()
        mean = self._total / self._weight if self._weight else float("nan")
        self._total = self._weight = 0.0
        return mean


def _error(epoch: int, step: int, outcome: Outcome, loss: float, weight: float) -> NonFiniteError:
    if outcome.calls is not None:
        check_calls(outcome.calls)
    ranks = [rank for rank, own in enumerate(outcome.losses.tolist()) if not math.isfinite(own)]
    where = f"epoch {epoch}, step {step}"
    if ranks:
        return NonFiniteError(
            f"the loss is {loss} at {where}: rank {ranks[0]} computed it",
            "the run stops before anything is saved over",
            "lower the learning rate, clip gradients, or look at the samples of that step",
        )
    if not weight:
        return NonFiniteError(
            f"the loss is {loss} at {where}: no sample of the batch has a weight (all ignored?)"
        )
    if not math.isfinite(weight):
        return NonFiniteError(
            f"the weight of the batch is {weight} at {where}: is a weight of the loss no number?"
        )
    return NonFiniteError(f"the loss is {loss} at {where}, though each rank's own sum is finite (penalty?)")
