"""Choices that were made before, by what they depend on: the second run starts tuned."""

import hashlib
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import CellType, CodeType, FunctionType
from typing import Any

import torch
from torch import nn

from kway.data.arrays import InMemory
from kway.data.parts import Parts
from kway.devices import cpu
from kway.devices.remembered import digest, read, write
from kway.errors import UsageError
from kway.job import Job
from kway.records import Plan
from kway.training.subject import data_text
from kway.training.surroundings import gpu_name, versions
from kway.tuning.knobs import Choice, Subject, check_choice
from kway.world import World

# Of a function that is not defined yet where another one knows it.
_EMPTY = CellType()


def facts(
    job: Job, plan: Plan, model: nn.Module, subject: Subject, world: World, parts: Parts
) -> dict[str, Any]:
    """Return what a choice depends on: model, batch, machine, versions; plain values."""
    return {
        **job_facts(job, model, parts, torch.device(world.device)),
        "level": plan.exactness,
        "layout": plan.layout,
        "step_kind": subject.step_kind,
        "settings": plan.settings,
        "compiler": subject.compiler,
        "devices": len(plan.device_set),
        "threads": world.threads,
    }


def job_facts(job: Job, model: nn.Module, parts: Parts, device: torch.device) -> dict[str, Any]:
    """Return what the time of a job's steps depends on wherever they are spread: model, batch, machine, versions.

    Code counts as well: of the model's classes, loss, optimizer, penalty, schedule and metrics. Plain values.
    """
    named = list(model.named_parameters())
    return {
        "model": str(model),
        "code": sorted({code_of(getattr(type(module), "forward", None)) for module in model.modules()}),
        "parameters": [[n, list(p.shape), list(p.stride()), str(p.dtype), p.requires_grad] for n, p in named],
        "optimizer": code_of(job.optimizer),
        "loss": str(job.loss) if isinstance(job.loss, nn.Module) else code_of(job.loss),
        "beside": [code_of(each) for each in (job.penalty, job.schedule, *job.metrics.values())],
        "clip": job.clip,
        "ema": job.ema,
        "data": data_text(job.data),
        "sample": _shapes(_sample(parts)),
        "batch_size": job.batch_size,
        "micro_batch": job.micro_batch,
        "workers": job.workers,
        "precision": job.precision,
        "device": gpu_name(device) or cpu.model(),
        "usable": cpu.usable_cores(),
        "versions": {**versions(), "cuda": torch.version.cuda},
    }


def code_of(function: Any) -> str:
    """Return what tells a function from others: its name, a digest of its code, and of what a ``partial`` of it, its
    defaults or the function around it have given it, what is plain or a function.
    """
    if function is None:
        return ""
    if isinstance(function, partial):
        return f"{code_of(function.func)}({_given({**dict(enumerate(function.args)), **function.keywords})})"
    code = getattr(function, "__code__", None)
    name = (
        f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', type(function).__name__)}"
    )
    if code is None:
        return name
    digest = hashlib.sha256(_code(code).encode()).hexdigest()[:12]
    cells = zip(code.co_freevars, getattr(function, "__closure__", None) or (), strict=False)
    around = {key: cell.cell_contents for key, cell in cells if cell != _EMPTY}
    defaults = {**dict(enumerate(getattr(function, "__defaults__", None) or ()))}
    defaults |= getattr(function, "__kwdefaults__", None) or {}
    given = [
        _given({name: value for name, value in each.items() if value is not function})
        for each in (around, defaults)
    ]
    return f"{name}:{digest}" + "".join(f"[{each}]" for each in given if each)


def _given(values: Mapping[Any, Any]) -> str:
    """Write what of some values tells one call from another, whatever order sets are in."""
    plain = (bool, int, float, str, bytes, tuple, frozenset)
    told = {
        key: _constant(value) if isinstance(value, plain) else code_of(value)
        for key, value in values.items()
        if isinstance(value, (*plain, partial, FunctionType))
    }
    return ", ".join(f"{key}={told[key]}" for key in told)


def _code(code: Any) -> str:
    """Return the instructions of a code object with the names and constants in them, functions inside too."""
    return f"{code.co_code.hex()} {code.co_names} {_constant(code.co_consts)}"


def _constant(value: Any) -> str:
    """Write a constant of code. The order of a set is another one in each process."""
    if isinstance(value, CodeType):
        return _code(value)
    if isinstance(value, frozenset):
        return f"{{{', '.join(sorted(map(_constant, value)))}}}"
    return f"({', '.join(map(_constant, value))})" if isinstance(value, tuple) else repr(value)


def _sample(parts: Parts) -> Any:
    """Return what stands for a sample. A data set of the user's own is not asked: it may count, or draw."""
    rows = parts.dataset.rows() if isinstance(parts.dataset, InMemory) else None
    return None if rows is None else rows.arrays


def _shapes(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _shapes(item) for name, item in value.items()}
    if isinstance(value, tuple | list):
        return [_shapes(item) for item in value]
    return f"{list(value.shape)} {value.dtype}" if hasattr(value, "shape") else type(value).__name__


def _place(known: dict[str, Any]) -> Path:
    return Path("tuned") / f"{digest(known)}.json"


def recall(known: dict[str, Any], seconds: float | None) -> tuple[Choice, str] | None:
    """Return the choice that was made under the same facts, and when; ``None`` where there is none.

    ``seconds``: those that the user has given; a choice of which parts were left out for want of time counts only if it
    had as many.
    """
    held = read(_place(known), known)
    if held is None:
        return None
    try:
        enough = seconds is None or float(held["seconds"]) >= seconds
        return (check_choice(held["choice"]), str(held["made"])) if enough else None
    except (ValueError, KeyError, TypeError, UsageError):
        return None


def keep(known: dict[str, Any], choice: Choice, made: str, seconds: float) -> None:
    """Keep a choice that was made in ``seconds``; infinite where no more of them would have changed it."""
    write(_place(known), known, made=made, seconds=seconds, choice=dict(choice))
