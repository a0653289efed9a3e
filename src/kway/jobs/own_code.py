"""What tells the user's code in a job from what it was when a checkpoint was written."""

import hashlib
import re
from functools import partial
from typing import Any

from torch import nn

from kway.data.parts import Parts
from kway.job import Job
from kway.records import Plan
from kway.step.scaling import own_schedule
from kway.training.facts import facts_of
from kway.training.noted import CODE, VERSIONS
from kway.training.surroundings import versions
from kway.tuning.code import code_of

# Where an object lies is another place in each process.
_ADDRESS = re.compile(r"\b0x[0-9a-f]+")


def facts_with_code(job: Job, parts: Parts, plan: Plan, model: nn.Module) -> dict[str, Any]:
    """Return ``facts_of`` and the code, of which a run that goes on is told. ``model``: as it was built."""
    return {**facts_of(job, parts, plan, model), CODE: code_facts(job, model)}


def code_facts(job: Job, model: nn.Module) -> dict[str, Any]:
    """Return what tells the code of each part of a job, by what the user calls it, and the versions it is of.

    For a part: in which modules of Python it is, a digest of the code, and one of how it shows itself, which is what
    layers of torch were made with.
    """
    parts = {
        "the loss": job.loss,
        "the model": model,
        "the optimizer": job.optimizer,
        "the schedule": own_schedule(job.schedule)[0],
        "the penalty": job.penalty,
        "inputs": job.inputs,
        "target": job.target,
        **{f"the metric {name!r}": metric for name, metric in job.metrics.items()},
    }
    # Another Python compiles the same text to other instructions, and code of torch goes by its version.
    told = {name: _told(value) for name, value in parts.items() if value is not None}
    return {VERSIONS: " ".join(f"{name} {each}" for name, each in versions().items()), **told}


def _told(value: Any) -> list[str]:
    try:
        home, code, shown = _texts(value)
    except Exception:  # how an object of the user's shows itself, or what its class has in it, may fail
        return []
    return [home, _digest(code), _digest(shown)]


def _texts(value: Any) -> tuple[str, str, str]:
    if isinstance(value, nn.Module):
        home = " ".join(sorted({type(module).__module__ for module in value.modules()}))
        # How far its lists have grown is no part of what a model is.
        return home, code_of(value, lists=False), _ADDRESS.sub("", str(value))
    function = value
    while isinstance(function, partial):
        function = function.func
    return str(getattr(function, "__module__", "")), code_of(value), ""


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()[:12]
