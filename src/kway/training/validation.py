"""What a run does with held-out data: figures of it, and the decisions that follow, the same on all ranks."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kway.data.loader import Loader
from kway.registry import unknown
from kway.step.scaling import waits_for_figure
from kway.strategies.engine import Engine
from kway.training.spec import TrainSpec
from kway.training.stop import EarlyStop, improved
from kway.training.weights import save_weights

BEST = "best.safetensors"


def known_figure(name: str, metrics: Mapping[str, Any]) -> bool:
    """Whether ``name`` is ``validation_loss``, a metric, or ``METRIC/KEY`` of a metric that returns a dict."""
    return name == "validation_loss" or name in metrics or _key(name, metrics) is not None


def _key(name: str, metrics: Mapping[str, Any]) -> str | None:
    """Return KEY of ``METRIC/KEY``: which keys a metric returns shows only when it is called."""
    return next(
        (name[len(m) + 1 :] for m in metrics if name.startswith(f"{m}/") and len(name) > len(m) + 1), None
    )


def figure(values: Mapping[str, float], name: str, metrics: Mapping[str, Any]) -> float:
    """Return the figure called ``name`` of a validation. Raises ``UsageError`` where the validation lacks it."""
    key = name if name in values else _key(name, metrics)
    if key is None or key not in values:
        raise unknown("validation figure", name, values)
    return values[key]


@dataclass
class Validation:
    """Judges the model of ``engine`` on ``held``; keeps the best weights, and says when to stop.

    With a moving average of the weights, that is what is judged and kept. Every decision is taken from figures
    that all ranks share. ``at``: after how many steps it last judged; ``stopped``: what ended the run, or ``""``.
    """

    engine: Engine
    held: Loader
    spec: TrainSpec
    is_main: bool
    notice: Callable[[list[str]], None]
    warn: Callable[[str], None]
    at: int = -1
    figures: dict[str, float] = field(default_factory=dict)
    best: dict[str, Any] | None = None
    stopped: str = ""

    def __post_init__(self) -> None:
        """Start to wait for a figure that no longer gets better."""
        name = self.spec.early_stop
        self._stop = None if name is None else EarlyStop(name, self.spec.patience)
        self._best_sha256: str | None = None

    def state(self) -> dict[str, Any]:
        """Return what later decisions and the record depend on."""
        stop = None if self._stop is None else self._stop.state()
        return {
            "at": self.at,
            "figures": self.figures,
            "best": self.best,
            "best_sha256": self._best_sha256,
            "stop": stop,
        }

    def load(self, state: Mapping[str, Any], with_best: bool) -> None:
        """Go on from what ``state`` gave; what this run decides by another figure begins anew.

        ``with_best``: whether the best weights up to then are in the run's folder.
        """
        self.at, self.figures = state["at"], dict(state["figures"])
        best = state["best"]
        if best is not None and best["metric"] == self.spec.save_best and with_best:
            self.best, self._best_sha256 = dict(best), state["best_sha256"]
        if self._stop is not None and state["stop"] is not None:
            self._stop.load(state["stop"])
            # Also where the run was at its end then, and had nothing to stop.
            if self._stop.is_over:
                self.stopped = self._text(self.at)

    def judge(self, epoch: int, steps: int, at_the_end: bool) -> dict[str, float]:
        """Evaluate after ``steps`` steps of the run, in ``epoch`` (from 0), and decide. A collective.

        ``at_the_end``: the run has taken all its steps, so that nothing is left to stop. Raises ``UsageError``
        where a decision needs a figure that no metric returned.
        """
        self.at = steps
        self.notice(self.engine.equalise())
        with self.engine.averaged():
            values = self.engine.evaluate(self.held.epoch(0))
            self.figures = {"validation_loss": values.pop("loss"), **values}
            self._keep_best(epoch)
        if self.engine.schedule is not None and waits_for_figure(self.engine.schedule):
            self.engine.schedule.step(self.figures["validation_loss"])
        self._judge_stop(epoch, at_the_end)
        return self.figures

    def _keep_best(self, epoch: int) -> None:
        name = self.spec.save_best
        if name is None:
            return
        value = figure(self.figures, name, self.spec.job.metrics)
        if not improved(name, value, None if self.best is None else self.best["value"]):
            return
        self.best = {"metric": name, "value": value, "epoch": epoch + 1, "step": self.at}
        state = self.engine.state()
        if self.is_main:
            self._write_best(state)

    def _write_best(self, state: dict[str, Any]) -> None:
        """Write the best weights. A full disk ends no run: the next best is tried again."""
        path = Path(self.spec.folder) / BEST
        try:
            save_weights(state, path, self.spec.made | self.engine.made)
            self._best_sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
        except OSError as error:
            text = f"the best weights so far, of step {self.at}, were not written to {path}: {error.strerror or error}"
            self.warn(text)

    def _judge_stop(self, epoch: int, at_the_end: bool) -> None:
        if self._stop is None:
            return
        name = self._stop.name
        value = figure(self.figures, name, self.spec.job.metrics)
        if self._stop.judge(value) and not at_the_end:
            self.stopped = self._text(self.at, f"epoch {epoch + 1}, ")

    def _text(self, step: int, epoch: str = "") -> str:
        assert self._stop is not None
        return (
            f"stopped early after {epoch}step {step}: {self._stop.name} was not better than "
            f"{self._stop.best:.6g} in {self._stop.patience} validations in a row"
        )
