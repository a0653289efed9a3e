"""When a run saves its state, and what it saves. All ranks take part, rank 0 writes."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kway.checkpoints.names import own_weights
from kway.checkpoints.reading import Checkpoint
from kway.checkpoints.snapshot import Snapshot
from kway.checkpoints.state import flatten
from kway.checkpoints.writer import Writer
from kway.errors import KwayError, StoppedError, UsageError
from kway.records import Plan
from kway.step.deterministic import bits_hold_within
from kway.strategies.engine import Engine
from kway.training.requests import SAVE
from kway.training.spec import TrainSpec

FOLDER = "checkpoints"


@dataclass(frozen=True)
class Position:
    """Where a run stands: ``steps`` optimizer steps taken, the next one is step ``step`` of ``epoch`` (from 0)."""

    steps: int
    epoch: int
    step: int


def snapshot(
    engine: Engine, position: Position, plan: Plan, facts: dict[str, Any], run: dict[str, Any]
) -> Snapshot:
    """Return the whole state of a run as it lives in memory. ``run``: the state of the loop around the engine."""
    parts = {
        **engine.parts(),
        "run": {**run, "step_of_epoch": position.step},
        "job": facts,
        "plan": {**plan.to_dict(), "devices": plan.devices},
        "within": bits_hold_within(engine.device, plan.shards) if plan.exactness == "bits" else None,
    }
    return Snapshot(position.steps, position.epoch, own_weights(engine.model), parts)


class Saver:
    """Saves the state of ``engine``'s run into ``spec.folder``/checkpoints, as often as ``spec`` says."""

    def __init__(self, engine: Engine, spec: TrainSpec, is_main: bool) -> None:
        self._engine, self._spec, self._every = engine, spec, spec.checkpoint_every
        self._writer = Writer(Path(spec.folder) / FOLDER, spec.keep) if is_main and spec.is_kept else None
        # ``at``: after how many steps the last save was begun.
        self._since, self.at, self._warned = time.monotonic(), -1, False
        groups = engine.parts()["optimizer"]["groups"]
        # Seconds that training waited, by save.
        self.held_s: list[float] = []
        # As the optimizer began: what a schedule has changed later says nothing about the job.
        self.options = [{name: str(value) for name, value in group.items()} for group in groups]

    def check(self) -> None:
        """Raise ``UsageError`` for state that cannot be stored, before the run has taken a step."""
        if self._every is not None:
            for part, state in self._engine.parts().items():
                flatten(state, part)

    def match(self, checkpoint: Checkpoint, options: list[dict[str, str]]) -> None:
        """Raise ``UsageError`` that lists what differs where the optimizer began with other options."""
        pairs = zip(options, self.options, strict=False)
        differ = [
            f"{k} {a.get(k)}, now {b.get(k)}" for a, b in pairs for k in {**a, **b} if a.get(k) != b.get(k)
        ]
        if len(options) != len(self.options):
            differ.append(f"{len(options)} groups of parameters, now {len(self.options)}")
        if differ:
            raise UsageError(
                f"checkpoint {checkpoint.path} is of a job with another optimizer: {'; '.join(differ)}",
                "its state goes with its options",
                "go on with the same optimizer, or start a new run from the weights (--init)",
            )

    def wish(self) -> int:
        """Return SAVE on the rank that keeps the time when it is time to save."""
        timed = self._every is not None and self._every.unit == "seconds" and self._writer is not None
        passed = time.monotonic() - self._since
        return SAVE if timed and self._every is not None and passed >= self._every.count else 0

    def due(self, steps: int, epochs: int | None = None) -> bool:
        """Whether it is time after ``steps`` steps of the run; ``epochs`` is set at the end of an epoch only."""
        every = self._every
        if every is None or every.unit == "seconds":
            return False
        at_epoch = epochs is not None
        return every.unit == ("epochs" if at_epoch else "steps") and every.due(steps, epochs)

    @property
    def is_on(self) -> bool:
        """Whether the run saves by itself."""
        return self._every is not None

    def save(self, position: Position, run: dict[str, Any]) -> list[str]:
        """Start to save; return lines for the user. ``run``: the loop's own state.

        Never raises for what keeps a file from being written: see ``Writer``.
        """
        self._since, self.at = time.monotonic(), position.steps
        if self._writer is None:
            return []
        state = {**run, "options": self.options}
        self._writer.save(snapshot(self._engine, position, self._spec.plan, self._spec.facts, state))
        return self._told()

    def stop(self, why: str) -> KwayError:
        """Wait for the last save and return the error that ends a run which was asked to stop after it."""
        told = self.close()
        where = f"{Path(self._spec.folder) / FOLDER}"
        if told and self._writer is not None and (not self._writer.saved or self._writer.failed):
            return KwayError(f"stopped by {why} after step {self.at}, without a checkpoint", told[-1])
        return StoppedError(
            f"stopped by {why} after step {self.at}",
            f"{where}/step-{self.at} is complete",
            "go on with --resume",
        )

    def close(self) -> list[str]:
        """Wait for the last save; return lines for the user."""
        if self._writer is None:
            return []
        self._writer.close()
        return self._told()

    def summary(self) -> dict[str, Any] | None:
        """Return what was saved, for the record; ``None`` where nothing was to be."""
        if self._writer is None or (self._every is None and not self._writer.saved):
            return None
        return {
            "saved": len(self._writer.saved),
            "failed": self._writer.failures,
            "last": self._writer.saved[-1] if self._writer.saved else None,
            "held_s": list(self.held_s),
            "waited_s": self._writer.waited_s,
        }

    def _told(self) -> list[str]:
        if self._writer is None:
            return []
        lines = list(self._writer.notices)
        self._writer.notices.clear()
        if self._writer.failed and not self._warned:
            self._warned = True
            lines.append(self._writer.failed)
        return lines
