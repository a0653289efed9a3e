"""What a record says of the job: enough to tell, a year later, what was trained or proved."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kway.data.arrays import InMemory
from kway.data.parts import Parts
from kway.job import Job

# What ``kway.training.facts`` knows, and the record has not elsewhere.
_FACTS = ("loss", "penalty", "schedule", "clip", "shuffle")


def subject_of(
    job: Job, facts: Mapping[str, Any], model: nn.Module, train: Parts, held: Parts | None
) -> dict[str, Any]:
    """Return the job as plain values: see ``kway.records.Training``. ``facts``: those of its checkpoints."""
    parameters = [parameter for _, parameter in model.named_parameters()]
    return {
        "data": data_text(job.data),
        "samples": train.order.samples,
        "held_out": None if held is None else held.order.samples,
        **{name: facts[name] for name in _FACTS},
        "micro_batch": job.micro_batch,
        "workers": train.workers,
        "init": str(job.init) if isinstance(job.init, str | Path) else function_name(job.init),
        "parameters": sum(parameter.numel() for parameter in parameters),
        "trainable": sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
    }


def optimizer_facts(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the ``name`` of an optimizer and the options of its ``groups``, torch's defaults among them."""
    groups = [
        {name: _plain(value) for name, value in group.items() if not name.startswith("param")}
        for group in optimizer.param_groups
    ]
    return {"name": type(optimizer).__name__, "groups": groups}


def function_name(function: Any) -> str | None:
    """Return what a function, or the one inside a ``partial``, is called; the class of an object."""
    while isinstance(function, partial):
        function = function.func
    return None if function is None else str(getattr(function, "__name__", type(function).__name__))


def data_text(data: Any) -> str:
    """Name a data set: by its name, else by the shapes of its arrays, else by its class."""
    if isinstance(data, torch.utils.data.DataLoader):
        return data_text(data.dataset)
    if isinstance(data, InMemory) and data.name:
        return data.name
    if isinstance(data, tuple) and data and all(hasattr(item, "shape") for item in data):
        return ", ".join(map(data_text, data))
    if isinstance(data, Mapping):
        return ", ".join(f"{name}: {data_text(item)}" for name, item in data.items())
    if hasattr(data, "shape") and hasattr(data, "dtype"):
        kind = str(data.dtype).removeprefix("torch.")
        return f"{kind} {'x'.join(map(str, data.shape))}"
    return type(data).__name__


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
