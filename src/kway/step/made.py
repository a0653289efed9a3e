"""What a model has made since it was built, when it first ran, given to another copy of it that has not run."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from kway.checkpoints.names import own_modules, own_parameters, own_weights
from kway.errors import UsageError

BUFFER = "buffer"


def add_buffer(module: nn.Module, name: str, value: torch.Tensor, persistent: bool = True) -> None:
    """Register a buffer that another copy of ``module`` has made.

    An attribute of this name that is ``None`` gives way, as it did there. Raises ``UsageError`` for any other.
    """
    _make_room(module, name)
    if persistent:
        # Some classes have a register_buffer of their own without the option.
        module.register_buffer(name, value)
    else:
        module.register_buffer(name, value, persistent=False)


def names_of(model: nn.Module, state: Mapping[str, Any] | None = None) -> frozenset[str]:
    """Return the own names of a model's tensors, by which ``made_since`` knows what is new.

    ``state``: its ``state_dict(keep_vars=True)``, where that is there already.
    """
    return frozenset(own_weights(model, model.state_dict(keep_vars=True) if state is None else state))


def made_since(
    names: frozenset[str], model: nn.Module, state: Mapping[str, Any] | None = None
) -> dict[str, str]:
    """Return what each tensor is that ``model`` has and ``names`` lack: ``buffer``, or a ``frozen`` or ``trained``
    parameter. ``state``: as for ``names_of``.
    """
    new = sorted(names_of(model, state) - names)
    held = own_parameters(model, remove_duplicate=False) if new else {}
    return {
        name: ("trained" if held[name].requires_grad else "frozen") if name in held else BUFFER
        for name in new
    }


def unmade(
    state: Mapping[str, torch.Tensor], made: Mapping[str, str], model: nn.Module
) -> dict[str, torch.Tensor]:
    """Return ``state`` without what another copy of ``model`` has made and this one has not."""
    own = names_of(model)
    return {name: value for name, value in state.items() if name in own or name not in made}


def add_made(model: nn.Module, state: Mapping[str, torch.Tensor], made: Mapping[str, str]) -> None:
    """Give ``model`` the tensors of ``state`` that another copy of it has ``made`` (see ``made_since``), where it lacks
    them. Raises ``UsageError`` where it has something else in their place.
    """
    if not made:
        return
    own, modules = names_of(model), own_modules(model)
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    for name, kind in made.items():
        path, _, leaf = name.rpartition(".")
        if name in own or name not in state or path not in modules:
            continue
        value = state[name].to(device, copy=True)
        if kind == BUFFER:
            add_buffer(modules[path], leaf, value)
        else:
            _make_room(modules[path], leaf)
            modules[path].register_parameter(leaf, nn.Parameter(value, requires_grad=kind == "trained"))


def _make_room(module: nn.Module, name: str) -> None:
    own = vars(module)
    for held in (own, own["_parameters"], own["_modules"]):
        if name in held and held[name] is None:
            del held[name]
    if hasattr(module, name) and name not in module._buffers:
        raise UsageError(
            f"{name!r} of a {type(module).__name__} was made while the model ran, and a model that has not run has a "
            f"{type(getattr(module, name)).__name__} there",
            "what is made later takes the place of nothing or of None",
            "make it with the model, or give it a name of its own",
        )
