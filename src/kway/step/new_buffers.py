"""Buffers that a model has made since it was built, given to another copy of it."""

from collections.abc import Mapping

import torch
from torch import nn

from kway.errors import UsageError


def add_buffer(module: nn.Module, name: str, value: torch.Tensor, persistent: bool = True) -> None:
    """Register a buffer that another copy of ``module`` has made.

    An attribute of this name that is ``None`` gives way, as it did there. Raises ``UsageError`` for any other.
    """
    own = vars(module)
    for held in (own, own["_parameters"], own["_modules"]):
        if name in held and held[name] is None:
            del held[name]
    if hasattr(module, name) and name not in module._buffers:
        raise UsageError(
            f"buffer {name!r} of a {type(module).__name__} was made while the model ran, and a model that has not "
            f"run has {type(getattr(module, name)).__name__} there",
            "a buffer takes the place of nothing or of None",
            "register it when the model is made, or give it a name of its own",
        )
    if persistent:
        # Some classes have a register_buffer of their own without the option.
        module.register_buffer(name, value)
    else:
        module.register_buffer(name, value, persistent=False)


def register_new(model: nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    """Give ``model`` the buffers in ``state`` that it has no tensor for: layers may make some when they first run.

    Raises as ``add_buffer`` does.
    """
    own, modules = model.state_dict(), dict(model.named_modules())
    for name, value in state.items():
        path, _, leaf = name.rpartition(".")
        if name not in own and path in modules:
            add_buffer(modules[path], leaf, value)
