"""How far an epoch has come, and how many seconds of training that took, whatever it was interrupted by."""

import time
from dataclasses import dataclass, field
from typing import Any

from kway.step.tally import Tally
from kway.training.held import Stop


@dataclass
class Course:
    """``step`` batches, ``samples``, ``seconds`` of training, ``taken`` optimizer steps.

    ``since``: from when on seconds are to be added, but for ``stops``; ``None`` while it is paused.
    """

    tally: Tally
    step: int = 0
    samples: int = 0
    seconds: float = 0.0
    taken: int = 0
    since: float | None = None
    stops: list[Stop] = field(default_factory=list)

    def passed(self, now: float) -> float:
        """Return ``seconds`` at the time ``now``, at which the device has been waited for."""
        if self.since is None:
            return self.seconds
        return self.seconds + now - self.since - sum(stop() for stop in self.stops)

    def state(self, stopped: Stop) -> list[float]:
        """Return what a later run goes on from, beside ``tally`` and ``step``: the next fields in order.

        ``stopped``: how long training has stood still by now. The device has been waited for.
        """
        held = 0.0 if self.since is None else stopped()
        return [self.samples, self.passed(time.perf_counter()) - held, self.taken]

    def row(self, epoch: int, loss: float, figures: dict[str, float], rate: float) -> dict[str, Any]:
        """Return what a record says of epoch number ``epoch``, from 0, which is over. ``figures``: beside ``loss``."""
        return {
            "epoch": epoch + 1,
            "steps": self.taken,
            "samples": self.samples,
            "train_loss": loss,
            **figures,
            "seconds": self.seconds,
            "samples_per_s": self.samples / self.seconds if self.seconds else 0.0,
            "lr": float(rate),
        }

    def pause(self, now: float) -> None:
        """Count no more until ``since`` is set."""
        self.seconds, self.since = self.passed(now), None
        self.stops.clear()
