"""Weights & Biases and MLflow as trackers. Either is imported when a run begins, and never otherwise.

Signatures: ``wandb.init``, ``Run.log`` and ``Run.finish`` of https://docs.wandb.ai/ref/python; ``mlflow.start_run``,
``log_params``, ``log_metrics`` and ``end_run`` of https://mlflow.org/docs/latest/python_api/mlflow.html, with the
arguments ``synchronous`` and ``run_id`` of its later second versions and the third.
"""

import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from kway.trackers.protocol import FAILED, FINISHED, STOPPED, Tracker, needs

# What MLflow takes in the name of a figure, from every store.
_NOT_IN_NAMES = re.compile(r"[^\w\-. /]")
# What a run that goes on from a checkpoint may have otherwise: where it runs, how far, and how a step is taken. MLflow
# refuses another value of a parameter, and takes one of a tag.
_OF_PARTS = (
    "resumed_from_step", "devices", "strategy", "exactness", "step_kind", "micro_batch", "workers", "epochs",
    "stops_after", "steps_per_epoch", "held_out", "init",
)  # fmt: skip


class Wandb:
    """One run of Weights & Biases. ``options``: of ``wandb.init``."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = dict(options)
        self._run: Any = None

    def begin(self, config: Mapping[str, Any]) -> None:
        """Start the run; what the options have under ``config`` is added."""
        import wandb

        own = {**config, **(self._options.get("config") or {})}
        self._run = wandb.init(**{**self._options, "config": own})

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Hand figures on; they are sent in the background."""
        self._run.log(dict(metrics), step=step)

    def end(self, status: str) -> None:
        """Send what is left. A run that did not finish counts as failed there; one that never started has no end."""
        if self._run is not None:
            self._run.finish(exit_code=int(status != FINISHED))


class Mlflow:
    """One run of MLflow. ``options``: of ``mlflow.start_run``."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = dict(options)
        self._id = ""
        self._last: Any = None

    def begin(self, config: Mapping[str, Any]) -> None:
        """Start the run and store its configuration: what a part of it that goes on may have otherwise, as tags."""
        import mlflow

        tags = {name: str(config[name]) for name in _OF_PARTS if name in config}
        tags |= self._options.get("tags") or {}
        self._id = mlflow.start_run(**{**self._options, "tags": tags}).info.run_id
        try:
            params = {name: value for name, value in config.items() if name not in _OF_PARTS}
            mlflow.log_params(params, run_id=self._id)
        except BaseException:
            # What kept the configuration from arriving is what is told; where this fails as well, ``end`` tries again.
            with suppress(Exception):
                self._over(FAILED)
            raise

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Hand figures on; they are sent in the background, in order."""
        import mlflow

        named = {_NOT_IN_NAMES.sub("_", name): value for name, value in metrics.items()}
        self._last = mlflow.log_metrics(named, step=step, synchronous=False, run_id=self._id)

    def end(self, status: str) -> None:
        """Wait for the figures to arrive, and end the run. Raises what kept them from arriving.

        Nothing happens where no run was started or it has ended: the active one may be somebody else's.
        """
        if not self._id:
            return
        try:
            if self._last is not None:
                self._last.wait()
        finally:
            self._over(status)

    def _over(self, status: str) -> None:
        import mlflow

        mlflow.end_run(status={FINISHED: "FINISHED", STOPPED: "KILLED", FAILED: "FAILED"}[status])
        self._id = ""


def wandb(**options: Any) -> Tracker:
    """Return a tracker for Weights & Biases; ``options`` go to ``wandb.init``.

    Raises ``UsageError`` where the package is not installed.
    """
    needs("wandb", "wandb")
    return Wandb(options)


def mlflow(**options: Any) -> Tracker:
    """Return a tracker for MLflow; ``options`` go to ``mlflow.start_run``.

    Server and experiment are those of ``mlflow.set_tracking_uri`` and ``mlflow.set_experiment``, or of its variables.
    Raises ``UsageError`` where the package is not installed.
    """
    needs("mlflow", "mlflow")
    return Mlflow(options)
