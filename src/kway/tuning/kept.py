"""Choices that were made before, by what they depend on: the second run starts tuned."""

import hashlib
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kway.devices import cpu
from kway.devices.torch_facts import cache_folder
from kway.errors import UsageError
from kway.job import Job
from kway.records import Plan, write_atomically
from kway.training.subject import data_text, function_name
from kway.training.surroundings import gpu_name, versions
from kway.tuning.knobs import Choice, Subject, check_choice
from kway.world import World


def facts(job: Job, plan: Plan, model: nn.Module, subject: Subject, world: World) -> dict[str, Any]:
    """Return what a choice depends on: model, batch, machine, versions; plain values."""
    device = torch.device(world.device)
    return {
        "model": [type(module).__name__ for module in model.modules()],
        "parameters": [
            [n, list(p.shape), str(p.dtype), p.requires_grad] for n, p in model.named_parameters()
        ],
        "optimizer": function_name(job.optimizer),
        "loss": function_name(job.loss) or type(job.loss).__name__,
        "data": data_text(job.data),
        "batch_size": job.batch_size,
        "micro_batch": job.micro_batch,
        "workers": job.workers,
        "clip": str(job.clip),
        "ema": job.ema is not None,
        "precision": [job.precision, *subject.allowed],
        "level": plan.exactness,
        "layout": plan.layout,
        "step_kind": subject.step_kind,
        "settings": plan.settings,
        "compiler": subject.compiler,
        "device": gpu_name(device) or cpu.model(),
        "threads": world.threads,
        "versions": {**versions(), "cuda": torch.version.cuda},
    }


def _file(known: dict[str, Any]) -> Path:
    name = hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:24]
    return cache_folder() / "tuned" / f"{name}.json"


def recall(known: dict[str, Any]) -> tuple[Choice, str] | None:
    """Return the choice that was made under the same facts, and when; ``None`` where there is none."""
    try:
        held = json.loads(_file(known).read_text())
        # Another choice by a file of the same name is none.
        return (check_choice(held["choice"]), str(held["made"])) if held["facts"] == known else None
    except (OSError, ValueError, KeyError, TypeError, UsageError):
        return None


def keep(known: dict[str, Any], choice: Choice, made: str) -> None:
    """Keep a choice. A folder that cannot be written costs the next run its measurements, and nothing else."""
    with suppress(OSError):
        file = _file(known)
        file.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"made": made, "choice": dict(choice), "facts": known}, indent=2)
        write_atomically(file, (text + "\n").encode())
