"""Stops a run whose loss is no number, without making the device wait at every step."""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from kway.errors import NonFiniteError
from kway.step.mispaired import check_calls
from kway.step.outcome import Outcome
from kway.training.requests import LAG


@dataclass
class _Sent:
    """Losses and weights of some steps on their way to the host, and who wants to hear the last loss.

    ``at``: after how many steps they were sent.
    """

    at: int

    steps: list[tuple[int, int, Outcome]]
    values: torch.Tensor
    event: torch.cuda.Event | None
    told: Callable[[float], None] | None


class LossWatch:
    """Collects the outcomes of steps and adds up their losses, weighted as the losses were.

    On a GPU the values are sent back every ``every`` steps and read some steps later, the same on all ranks, when they
    have long arrived: the host does not wait. On a CPU, where reading costs nothing, they are read at once.

    ``compare``: as ``StepCore.compare``.
    """

    def __init__(
        self, device: torch.device, every: int = 50, compare: Callable[[bool], None] = lambda again: None
    ) -> None:
        self._compare = compare
        self.every, self._lag = (1, 0) if device.type == "cpu" else (every, LAG)
        self._count = 0
        self._open: list[tuple[int, int, Outcome]] = []
        self._sent: deque[_Sent] = deque()
        self._total, self._weight = 0.0, 0.0
        self.last: float | None = None

    def add(self, epoch: int, step: int, outcome: Outcome) -> None:
        """Take in the outcome of one step. Raises ``NonFiniteError``, on a GPU some steps later."""
        self._open.append((epoch, step, outcome))
        self._count += 1
        if len(self._open) >= self.every:
            self._send(None)
        self._take_arrived()

    def tell(self, told: Callable[[float], None]) -> None:
        """Call ``told`` with the loss of the last step once it is here. Raises ``NonFiniteError``."""
        if self._open:
            self._send(told)
        elif self._sent:
            before = self._sent[-1].told
            assert before is None, "a loss is told once"
            self._sent[-1].told = told
        elif self.last is not None:
            told(self.last)
        self._take_arrived()

    def check(self) -> None:
        """Read back what is open. A collective.

        Raises ``NonFiniteError`` that names epoch, step and rank, and ``MispairedError``.
        """
        if self._open:
            self._send(None)
        while self._sent:
            self._take(self._sent.popleft())
        self._compare(False)

    def _send(self, told: Callable[[float], None] | None) -> None:
        pairs = [outcome.pair for _, _, outcome in self._open]
        alike = len({pair.dtype for pair in pairs}) == 1
        values = torch.stack([pair if alike else pair.double() for pair in pairs])
        event = None
        if values.is_cuda:
            here = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            here.copy_(values, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(values.device))
            values = here
        self._sent.append(_Sent(self._count, self._open, values, event, told))
        self._open = []

    def _take_arrived(self) -> None:
        while self._sent and self._count - self._sent[0].at >= self._lag:
            self._take(self._sent.popleft())

    def _take(self, sent: _Sent) -> None:
        if sent.event is not None:
            sent.event.synchronize()
        for (epoch, step, outcome), (loss, weight) in zip(sent.steps, sent.values.tolist(), strict=True):
            if not (math.isfinite(loss) and math.isfinite(weight)):
                self._pair(outcome)
                raise _error(epoch, step, outcome, loss, weight)
            self._total += loss * weight
            self._weight += weight
            self.last = loss
        if sent.told is not None and self.last is not None:
            sent.told(self.last)

    def _pair(self, outcome: Outcome) -> None:
        """Raise ``MispairedError`` where that, and not the loss, may be why a step gave no number.

        A collective where the step does not tell: all ranks read the same losses after the same step.
        """
        if outcome.calls is not None:
            check_calls(outcome.calls)
        else:
            # A later step may have told, and is not read before this one.
            self._compare(True)

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
