"""What tells the user's code in a job from what it was when a checkpoint was written."""

import hashlib
import re
import sys
from functools import partial
from typing import Any

from torch import nn

from kway.data.parts import Parts
from kway.job import Job
from kway.records import Plan
from kway.step.scaling import own_schedule
from kway.training.facts import facts_of
from kway.training.noted import CODE
from kway.tuning.code import code_of, object_code

# Where an object lies is another place in each process.
_ADDRESS = re.compile(r"\b0x[0-9a-f]+")


def facts_with_code(job: Job, parts: Parts, plan: Plan, model: nn.Module) -> dict[str, Any]:
    """Return ``facts_of`` and the code, of which a run that goes on is told. ``model``: as it was built."""
    return {**facts_of(job, parts, plan, model), CODE: code_facts(job, model)}


def code_facts(job: Job, model: nn.Module) -> dict[str, Any]:
    """Return what tells the code of each part of a job, by what the user calls it, and which Python it is of.

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
    # Another Python compiles the same text to other instructions.
    python = ".".join(map(str, sys.version_info[:2]))
    return {"python": python, **{name: _told(value) for name, value in parts.items() if value is not None}}


def _told(value: Any) -> list[str]:
    try:
        home, code, shown = _texts(value)
    except Exception:  # how an object of the user's shows itself, or what its class has in it, may fail
        return []
    return [home, _digest(code), _digest(shown)]


def _texts(value: Any) -> tuple[str, str, str]:
    if isinstance(value, nn.Module):
        modules = [*value.modules()]
        home = " ".join(sorted({type(module).__module__ for module in modules}))
        return home, str(sorted({object_code(module) for module in modules})), _ADDRESS.sub("", str(value))
    if isinstance(value, str | list | tuple):
        return "", "", repr(value)
    function = value
    while isinstance(function, partial):
        function = function.func
    home = str(getattr(function, "__module__", ""))
    if isinstance(value, partial) or hasattr(value, "__code__"):
        return home, code_of(value), ""
    return home, object_code(value) or code_of(value), ""


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()[:12]
