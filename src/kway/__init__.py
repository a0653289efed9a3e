"""Train a plain PyTorch model on any number of devices: the number changes the time, never the result."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kway import trackers as trackers
    from kway.errors import (
        DataError,
        ItemError,
        KwayError,
        MispairedError,
        NonFiniteError,
        NotMeasuredError,
        OutOfMemoryError,
        RankError,
        RefusedError,
        ReplicaError,
        StallError,
        StoppedError,
        UsageError,
    )
    from kway.job import Job
    from kway.jobs.evaluating import evaluate, predict
    from kway.jobs.mapping import map as map
    from kway.jobs.measuring import measure
    from kway.jobs.parallel import parallel
    from kway.jobs.planning import plan
    from kway.jobs.profiling import profile
    from kway.jobs.proving import prove
    from kway.jobs.training import train
    from kway.jobs.tuning import tune
    from kway.step.gather import all_samples
    from kway.step.tally import accuracy

__version__ = "0.1.0"

# Names are imported when first used: the command line must start without torch.
_HOMES = {
    "DataError": "errors",
    "ItemError": "errors",
    "KwayError": "errors",
    "MispairedError": "errors",
    "NonFiniteError": "errors",
    "NotMeasuredError": "errors",
    "OutOfMemoryError": "errors",
    "RankError": "errors",
    "RefusedError": "errors",
    "ReplicaError": "errors",
    "StallError": "errors",
    "StoppedError": "errors",
    "UsageError": "errors",
    "Job": "job",
    "accuracy": "step.tally",
    "all_samples": "step.gather",
    "evaluate": "jobs.evaluating",
    "map": "jobs.mapping",
    "measure": "jobs.measuring",
    "parallel": "jobs.parallel",
    "plan": "jobs.planning",
    "predict": "jobs.evaluating",
    "profile": "jobs.profiling",
    "prove": "jobs.proving",
    "train": "jobs.training",
    "tune": "jobs.tuning",
}

# A package that is a public name itself: its functions go by the names of what they track with.
_PACKAGES = ("trackers",)

# ``map`` is not among them: ``from kway import *`` would take Python's own away.
__all__ = [
    "DataError",
    "ItemError",
    "Job",
    "KwayError",
    "MispairedError",
    "NonFiniteError",
    "NotMeasuredError",
    "OutOfMemoryError",
    "RankError",
    "RefusedError",
    "ReplicaError",
    "StallError",
    "StoppedError",
    "UsageError",
    "__version__",
    "accuracy",
    "all_samples",
    "evaluate",
    "measure",
    "parallel",
    "plan",
    "predict",
    "profile",
    "prove",
    "train",
    "tune",
]


def __getattr__(name: str) -> Any:
    """Import a public name from where it lives."""
    if name in _PACKAGES:
        return import_module(f"kway.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'kway' has no attribute {name!r}")
    return getattr(import_module(f"kway.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    """List the public names."""
    return [*sorted([*_HOMES, *_PACKAGES]), "__version__"]
