"""When a run saves its state, and what it saves. All ranks take part, rank 0 writes."""

import shlex
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kway.checkpoints.folder import final
from kway.checkpoints.names import own_weights
from kway.checkpoints.snapshot import Prepared, Snapshot
from kway.checkpoints.state import flatten
from kway.checkpoints.writer import Writer
from kway.errors import KwayError, StoppedError
from kway.records import Plan
from kway.strategies.engine import Engine
from kway.training.began import Began, began_in
from kway.training.held import held_on
from kway.training.requests import SAVE
from kway.training.spec import TrainSpec

FOLDER = "checkpoints"


@dataclass(frozen=True)
class Position:
    """Where a run stands: ``steps`` optimizer steps taken, the next one is step ``step`` of ``epoch`` (from 0)."""

    steps: int
    epoch: int
    step: int


RUN = "run"


def snapshot(
    engine: Engine, position: Position, plan: Plan, facts: dict[str, Any], beginning: Began
) -> Snapshot:
    """Return the state of a run as it lives in memory, but for that of the loop around the engine: the part ``RUN``.

    ``beginning``: how optimizer and schedule were before the first step.
    """
    state = engine.model.state_dict(keep_vars=True)
    parts = {
        **engine.parts(state),
        "job": facts,
        **beginning.parts,
        "plan": {**plan.to_dict(), "devices": plan.devices},
        "within": engine.holds_within,
    }
    return Snapshot(position.steps, position.epoch, own_weights(engine.model, state), parts)


def run_of(position: Position, run: dict[str, Any]) -> dict[str, Any]:
    """Return the part ``RUN`` of a checkpoint. ``run``: the state of the loop around the engine."""
    return {**run, "step_of_epoch": position.step}


def to_go_on(folder: str) -> str:
    """Say what makes the run in ``folder`` go on: in one that nobody named, too."""
    return f"go on with --resume --out {shlex.quote(folder)} (in Python: resume=True, out={folder!r})"


class Saver:
    """Saves the state of ``engine``'s run into ``spec.folder``/checkpoints, as often as ``spec`` says.

    ``noted``: see ``noted_of``.
    """

    def __init__(self, engine: Engine, spec: TrainSpec, is_main: bool, noted: dict[str, Any]) -> None:
        self._engine, self._spec, self._every = engine, spec, spec.checkpoint_every
        self._noted = noted
        self._writer = Writer(Path(spec.folder) / FOLDER, spec.keep) if is_main and spec.is_kept else None
        self._prepared: Prepared | None = None
        # ``at``: after how many steps the last save was begun.
        self._since, self.at, self._warned = time.monotonic(), -1, False
        self.held = held_on(engine.part.device)
        self.began = began_in(engine)

    def check(self) -> None:
        """Raise ``UsageError`` for state that cannot be stored, before the run has taken a step."""
        if self._every is not None:
            for part, state in self._engine.parts().items():
                flatten(state, part)

    def wish(self) -> int:
        """Return SAVE on the rank that keeps the time when it is time to save."""
        timed = self._every is not None and self._every.unit == "seconds" and self._writer is not None
        passed = time.monotonic() - self._since
        return SAVE if timed and self._every is not None and passed >= self._every.count else 0

    @property
    def is_on(self) -> bool:
        """Whether the run saves by itself."""
        return self._every is not None

    def prepare(self, position: Position) -> None:
        """Do for ``save`` what needs no number that a device may still be computing.

        Raises ``UsageError`` for state that cannot be stored, on the rank that writes.
        """
        if self._writer is not None:
            spec, facts = self._spec, {**self._spec.facts, "noted": self._noted}
            self._prepared = self._writer.prepare(
                snapshot(self._engine, position, spec.plan, facts, self.began)
            )

    def save(self, position: Position, run: dict[str, Any]) -> list[str]:
        """Start to save what was prepared; return lines for the user. ``run``: the loop's own state.

        Never raises for what keeps a file from being written: see ``Writer``.
        """
        self._since, self.at = time.monotonic(), position.steps
        if self._writer is None or self._prepared is None:
            return []
        prepared, self._prepared = self._prepared, None
        prepared.add(RUN, run_of(position, run))
        # The save before has ended: what it has to tell is complete.
        lines = self._told()
        self._writer.save(prepared)
        return lines

    def stop(self, why: str) -> KwayError:
        """Wait for the last save and return the error that ends a run which was asked to stop after it.

        Rank 0's is the one that knows.
        """
        self.close()
        done = f"stopped by {why} after step {self.at}"
        if self._writer is not None and self.last != self.at:
            gone = "it was written, and is not there any more"
            lacks = f"{done}, without a checkpoint of it: {self._writer.failed or gone}"
            return KwayError(lacks, *self._there())
        where = Path(self._spec.folder) / FOLDER / f"step-{self.at}"
        return StoppedError(done, f"{where} is complete", to_go_on(self._spec.folder))

    def no_weights(self, steps: int, error: OSError) -> KwayError:
        """Return the error of a run whose last weights, of step ``steps``, cannot be written because of ``error``."""
        folder = Path(self._spec.folder)
        lost = f"the weights of step {steps} cannot be written to {folder}"
        if not folder.is_dir():
            gone = f"{lost}, which was removed or renamed while the run was at work"
            return KwayError(gone, *self._there("run it again"))
        then = "run it again" if self.last is None else to_go_on(self._spec.folder)
        return KwayError(f"{lost}: {error.strerror or error}", *self._there(f"make room, and {then}"))

    def _there(self, do: str = "") -> tuple[str, str]:
        """Say what there is to go on from, and what to do: ``do``, where the checkpoints are not elsewhere by now."""
        if self.last is not None:
            return f"the last complete checkpoint is step-{self.last}", do
        if self._writer is None or not self._writer.saved:
            return "this run has saved no checkpoint", do
        return (
            "what it had saved went with the folder",
            "if it was renamed, go on with resume= (--resume-from) and its new name",
        )

    @property
    def last(self) -> int | None:
        """The step of the newest checkpoint of this run that is where it was written; ``None`` where none is."""
        saved = [] if self._writer is None else self._writer.saved
        return next((s for s in reversed(saved) if final(Path(self._spec.folder) / FOLDER, s).is_dir()), None)

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
            "held_s": self.held.seconds(),
            "waited_s": self._writer.waited_s,
        }

    def _told(self) -> list[str]:
        if self._writer is None:
            return []
        lines = list(self._writer.notices)
        self._writer.notices.clear()
        # Once for each time that it begins to fail.
        if self._writer.failed and not self._warned:
            lines.append(f"{self._writer.failed}; {self._writer.after_failure}")
        self._warned = self._writer.failed is not None
        return lines
