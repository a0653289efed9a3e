"""Batch normalisation in TorchScript: compiled code, in which nobody can put the statistics of the whole batch."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from kway.errors import RefusedError

_jit: Any = torch.jit
# Which input says whether batch statistics are used.
_TRAINING = {"aten::batch_norm": 5, "aten::native_batch_norm": 5, "aten::_native_batch_norm_legit": 5}


@dataclass(frozen=True)
class Scripted:
    """A scripted part of a model that normalises. ``always``: it uses batch statistics, whatever its mode.

    ``layers``: of those parts of it that choose by their mode, name and module.
    """

    name: str
    always: bool
    layers: list[tuple[str, nn.Module]]

    def using(self, trains: bool) -> str | None:
        """Name a layer that may use batch statistics now: a traced one does for good what it did then."""
        if self.always:
            return self.name
        return next(
            (name for name, module in self.layers if (trains and module.training) or _bare(module)), None
        )


def scripted(model: nn.Module) -> list[Scripted]:
    """List the scripted parts of ``model`` in which there is batch normalisation, outermost ones alone."""
    found: list[Scripted] = []
    inside: set[int] = set()
    for name, module in model.named_modules():
        if not isinstance(module, torch.jit.ScriptModule) or id(module) in inside:
            continue
        chosen = _choices(module)
        if chosen is None:
            continue
        inside |= {id(inner) for inner in module.modules()}
        if not chosen:
            continue
        named = [(".".join(p for p in (name, inner) if p), part) for inner, part in module.named_modules()]
        # Where none has statistics of its own, any of them may be what normalises.
        own = [(where, part) for where, part in named if hasattr(part, "running_mean")] or named
        found.append(Scripted(name, True in chosen, own if None in chosen else []))
    return found


def check_scripted(found: list[Scripted], trains: bool = True) -> None:
    """Raise ``RefusedError`` for one of ``scripted`` that may use batch statistics, of which a device has its own.

    ``trains``: whether modes count; else all are about to be those of evaluation.
    """
    for part in found:
        if (name := part.using(trains)) is not None:
            raise RefusedError(
                f"layer {name!r} (scripted) computes batch statistics in compiled code",
                "kway must know how to compute them over the whole batch",
                "give kway the model as it was before torch.jit, or let the layer use its running statistics: scripted "
                "code in evaluation mode (.eval()), traced code when it is traced",
            )


def _choices(module: Any) -> list[bool | None] | None:
    """Return what each normalisation was compiled with, ``None`` where that is computed from the module's mode.

    ``None`` in all for a module without a forward pass, whose parts are called one by one.
    """
    graph = getattr(module, "inlined_graph", None)
    if graph is None:
        return None
    # Nodes live as long as their graph is held.
    nodes = [(node, at) for kind, at in _TRAINING.items() for node in graph.findAllNodes(kind, True)]
    values = [[*node.inputs()][at].toIValue() for node, at in nodes]
    return [None if value is None else bool(value) for value in values]


def _bare(module: nn.Module) -> bool:
    return getattr(module, "running_mean", module) is None
