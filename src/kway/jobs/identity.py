"""What tells the model of a record from others of its name, which may be no more than ``Net`` or ``lambda``."""

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from kway.devices.remembered import digest
from kway.training.surroundings import versions
from kway.tuning.code import code_of


def identity_of(model: nn.Module) -> dict[str, Any]:
    """Return ``identity`` of a record, of a model as it was built.

    ``parameters``: how many numbers are trained or could be, ``None`` where its first run will tell; ``code``: a digest
    of its layers, the shapes of its parameters and its code, ``""`` where its first run makes layers.
    """
    held = list(model.named_parameters())
    if any(is_lazy(parameter) for parameter in [*model.parameters(), *model.buffers()]):
        return {"parameters": None, "code": ""}
    shapes = [[name, list(parameter.shape), str(parameter.dtype)] for name, parameter in held]
    return {
        "parameters": sum(parameter.numel() for _, parameter in held),
        # Values that code finds (a rank, a time) are no part of what a model is: they are others in each process.
        "code": digest([str(model), shapes, code_of(model, values=False)]),
    }


def differs(
    title: str, then: Mapping[str, Any], made_with: Mapping[str, str], now: Mapping[str, Any]
) -> tuple[str, str] | None:
    """Return in words of which model a record is and which one the job has; ``None`` where they may be the same one.

    ``then`` and ``now``: as of ``identity_of``; what one of them does not know is not compared, nor code that other
    versions of Python or torch have compiled or written: ``made_with`` is what the record was made with.
    """
    had, has = then.get("parameters"), now.get("parameters")
    if had is not None and has is not None and had != has:
        return f"{title} of {had:,} parameters", f"{title} of {has:,} parameters"
    same = then.get("code") == now.get("code") or not (then.get("code") and now.get("code"))
    if same or made_with != versions():
        return None
    return f"{title} as its layers or its code were then", f"{title} as it is now"
