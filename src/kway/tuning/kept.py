"""Choices that were made before, by what they depend on: the second run starts tuned."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
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
from kway.tuning.code import code_of
from kway.tuning.knobs import Choice, Subject, check_choice
from kway.world import World


@dataclass(frozen=True)
class Kept:
    """A choice, and when it was made. ``compiling_s``: what it took to compile, where it is compiled and the step as it
    is is not, else 0; ``gain_s``: by how much it was faster, a step. ``seconds``: how many there were to make it in,
    infinite where no more of them would have changed it; ``step_s``: those of a step as it is. ``busy``: what other
    programs kept busy meanwhile, or ``""``. ``undecided``: see ``Found``.
    """

    choice: Choice
    made: str
    compiling_s: float = 0.0
    gain_s: float = 0.0
    seconds: float = math.inf
    step_s: float = 0.0
    busy: str = ""
    undecided: bool = False

    def repays(self, steps: int) -> bool:
        """Whether a run of so many steps wins what compiling may take."""
        return self.compiling_s == 0 or steps * self.gain_s >= self.compiling_s


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

    Code counts as well, with what it calls: of model and data, loss, optimizer, penalty, schedule, metrics, and what
    takes a batch apart. Plain values.
    """
    named = list(model.named_parameters())
    beside = (job.penalty, job.schedule, job.inputs, job.target, *job.metrics.values())
    return {
        "model": str(model),
        "code": code_of(model),
        "parameters": [[n, list(p.shape), list(p.stride()), str(p.dtype), p.requires_grad] for n, p in named],
        "optimizer": code_of(job.optimizer),
        "loss": [str(job.loss) if isinstance(job.loss, nn.Module) else "", code_of(job.loss)],
        "beside": [code_of(each) for each in beside],
        "clip": job.clip,
        "ema": job.ema,
        "data": data_text(job.data),
        "data_code": code_of(job.data, lists=False),
        "sample": _shapes(_sample(parts)),
        "batch_size": job.batch_size,
        "micro_batch": job.micro_batch,
        "workers": job.workers,
        "precision": job.precision,
        "device": gpu_name(device) or cpu.model(),
        "usable": cpu.usable_cores(),
        "versions": {**versions(), "cuda": torch.version.cuda},
    }


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


def recall(known: dict[str, Any], seconds: float | None) -> Kept | None:
    """Return the choice that was made under the same facts; ``None`` where there is none.

    ``seconds``: those that the user has given; a choice of which parts were left out for want of time counts only if it
    had as many, and one that could not be decided not at all.
    """
    held = read(_place(known), known)
    if held is None:
        return None
    try:
        there = float(held["seconds"])
        undecided = bool(held.get("undecided", False))
        if seconds is not None and (undecided or not there >= seconds):
            return None
        compiling_s, gain_s, step_s = (
            float(held.get(name, 0.0)) for name in ("compiling_s", "gain_s", "step_s")
        )
        choice, made, others = check_choice(held["choice"]), str(held["made"]), str(held.get("busy", ""))
        return Kept(choice, made, compiling_s, gain_s, there, step_s, others, undecided)
    except (ValueError, KeyError, TypeError, UsageError, OverflowError):
        return None


def keep(known: dict[str, Any], kept: Kept) -> None:
    """Keep a choice under the facts that it was made under."""
    numbers = {name: getattr(kept, name) for name in ("seconds", "compiling_s", "gain_s", "step_s")}
    said = {"busy": kept.busy, "undecided": kept.undecided}
    write(_place(known), known, made=kept.made, choice=dict(kept.choice), **said, **numbers)
