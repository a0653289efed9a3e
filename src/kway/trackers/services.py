"""Weights & Biases and MLflow as trackers. Either is imported when a run begins, and never otherwise.

Signatures: ``wandb.init``, ``Run.log`` and ``Run.finish`` of https://docs.wandb.ai/ref/python; ``mlflow.start_run``,
``log_params``, ``log_metrics`` and ``end_run`` of https://mlflow.org/docs/latest/python_api/mlflow.html, with the
arguments ``synchronous`` and ``run_id`` of its later second versions and the third.
"""

import re
from collections.abc import Mapping
from typing import Any

from kway.trackers.protocol import FAILED, FINISHED, STOPPED, Tracker, needs

# What MLflow takes in the name of a figure, from every store.
_NOT_IN_NAMES = re.compile(r"[^\w\-. /]")


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
        """Send what is left. A run that did not finish counts as failed there."""
        self._run.finish(exit_code=int(status != FINISHED))


class Mlflow:
    """One run of MLflow. ``options``: of ``mlflow.start_run``."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = dict(options)
        self._id = ""
        self._last: Any = None

    def begin(self, config: Mapping[str, Any]) -> None:
        """Start the run and store its configuration."""
        import mlflow

        self._id = mlflow.start_run(**self._options).info.run_id
        mlflow.log_params(dict(config), run_id=self._id)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Hand figures on; they are sent in the background, in order."""
        import mlflow

        named = {_NOT_IN_NAMES.sub("_", name): value for name, value in metrics.items()}
        self._last = mlflow.log_metrics(named, step=step, synchronous=False, run_id=self._id)

    def end(self, status: str) -> None:
        """Wait for the figures to arrive, and end the run. Raises what kept them from arriving."""
        import mlflow

        try:
            if self._last is not None:
                self._last.wait()
        finally:
            mlflow.end_run(status={FINISHED: "FINISHED", STOPPED: "KILLED", FAILED: "FAILED"}[status])


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
