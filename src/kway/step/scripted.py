"""Batch normalisation in TorchScript: compiled code, in which nobody can put the statistics of the whole batch."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import nn

from kway.errors import RefusedError

# Which input says whether batch statistics are used.
_TRAINING = {"aten::batch_norm": 5, "aten::native_batch_norm": 5, "aten::_native_batch_norm_legit": 5}
# What a value in compiled code is now, ``None`` where that cannot be said. Argument: whether modes count, or are about
# to be those of evaluation.
Read = Callable[[bool], bool | None]


@dataclass(frozen=True)
class Scripted:
    """A place in compiled code that normalises. ``name``: the layer. ``uses``: whether by batch statistics."""

    name: str
    uses: Read


def scripted(model: nn.Module) -> list[Scripted]:
    """List what normalises in the scripted and traced parts of ``model``, whichever of their methods is called."""
    return [
        found
        for name, module in model.named_modules()
        if isinstance(module, torch.jit.ScriptModule)
        for found in _places(name, module)
    ]


def check_scripted(found: list[Scripted], trains: bool = True) -> None:
    """Raise ``RefusedError`` for one of ``scripted`` that may use batch statistics, of which a device has its own.

    ``trains``: whether modes count; else all are about to be those of evaluation.
    """
    for place in found:
        if place.uses(trains) is not False:
            what = f"layer {place.name!r}" if place.name else "the model"
            raise RefusedError(
                f"{what} (scripted) computes batch statistics in compiled code",
                "kway must know how to compute them over the whole batch",
                "give kway the model as it was before torch.jit, or let the layer use its running statistics: scripted "
                "code in evaluation mode (.eval()), traced code when it is traced",
            )


def _places(name: str, module: Any) -> list[Scripted]:
    # Each part by itself too: Python may call it, and what is forked or behind an interface is in no other graph.
    compiled = module._c
    found = []
    for method in compiled._method_names():
        # Nodes live as long as their graph is held.
        graph = compiled._get_method(method).inlined_graph
        for node, conditions in _normalising(graph.nodes(), [], module):
            inputs = [*node.inputs()]
            chosen = inputs[_TRAINING[node.kind()]]
            own, _ = _owner(inputs[3], module)
            found.append(
                Scripted(".".join(filter(None, (name, own))), _where(conditions, _read(chosen, module)))
            )
    return found


def _normalising(nodes: Any, conditions: list[Read], module: Any) -> Iterator[tuple[Any, list[Read]]]:
    """Yield the nodes that normalise, and the conditions under which each is come to."""
    for node in nodes:
        if node.kind() in _TRAINING:
            yield node, conditions
        blocks = [*node.blocks()]
        if node.kind() == "prim::If":
            condition = _mode(next(node.inputs()), module)
            ways = [[*conditions, condition], [*conditions, _turned(condition)]]
        else:
            ways = [conditions] * len(blocks)
        for block, way in zip(blocks, ways, strict=True):
            yield from _normalising(block.nodes(), way, module)


def _mode(value: Any, module: Any) -> Read:
    """Return what reads a condition that is a mode. Any other may be set by the code before it is come to."""
    node = value.node()
    is_mode = node.kind() == "prim::GetAttr" and node.s("name") == "training"
    return _read(value, module) if is_mode else _unknown


def _unknown(trains: bool) -> None:
    return None


def _where(conditions: list[Read], uses: Read) -> Read:
    """Return what reads ``uses`` where it is come to at all."""

    def read(trains: bool) -> bool | None:
        return False if any(condition(trains) is False for condition in conditions) else uses(trains)

    return read


def _turned(condition: Read) -> Read:
    return lambda trains: None if (known := condition(trains)) is None else not known


def _owner(value: Any, module: Any) -> tuple[str, Any]:
    """Return name and module, seen from ``module``, of what an attribute in its code belongs to; ``None`` where it is
    none.
    """
    names: list[str] = []
    node = value.node()
    while node.kind() == "prim::GetAttr":
        names.insert(0, node.s("name"))
        node = next(node.inputs()).node()
    if not names or node.kind() != "prim::Param":
        return "", None
    # Not get_submodule, which compiled modules do not have.
    return ".".join(names[:-1]), reduce(getattr, names[:-1], module)


def _read(value: Any, module: Any) -> Read:
    """Return what reads a condition in the code of ``module``."""
    node = value.node()
    constant, kind = value.toIValue(), node.kind()
    if isinstance(constant, bool):
        return lambda trains: constant
    inputs = [*node.inputs()]
    if kind == "prim::GetAttr":
        _, owner = _owner(value, module)
        return _attribute(owner, node.s("name"))
    if kind == "aten::__not__":
        return _turned(_read(inputs[0], module))
    if kind == "prim::If":
        at = [output.debugName() for output in node.outputs()].index(value.debugName())
        ways = [_read([*block.outputs()][at], module) for block in node.blocks()]
        return _either(_read(inputs[0], module), *ways)
    return _unknown


def _attribute(owner: Any, name: str) -> Read:
    def read(trains: bool) -> bool | None:
        if name == "training" and not trains:
            return False
        found = getattr(owner, name, None)
        return found if isinstance(found, bool) else None

    return read


def _either(condition: Read, then: Read, otherwise: Read) -> Read:
    def read(trains: bool) -> bool | None:
        known = condition(trains)
        if known is not None:
            return then(trains) if known else otherwise(trains)
        first = then(trains)
        return first if first == otherwise(trains) else None

    return read
