"""A model's own names, whatever wraps it: files from wrapped and bare models are the same."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import nn

from kway.errors import UsageError

T = TypeVar("T")

# The attribute under which each wrapper holds the model. By name: importing some of these takes a second.
WRAPPERS = {
    "torch.nn.parallel.data_parallel.DataParallel": "module",
    "torch.nn.parallel.distributed.DistributedDataParallel": "module",
    "torch._dynamo.eval_frame.OptimizedModule": "_orig_mod",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.CheckpointWrapper": "_checkpoint_wrapped_module",
}
PREFIXES = frozenset(WRAPPERS.values())


def own_names(model: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Return by each of ``names`` that parameters, buffers or modules of ``model`` bear the one without wrappers.

    Wrappers are known by their class, at any depth: a user's module that is called ``module`` keeps its name.
    """
    # A loop asks between two steps: to follow each through the model would take milliseconds.
    return {
        name: _own_name(model, name) if any(prefix in name for prefix in PREFIXES) else name for name in names
    }


def own_weights(model: nn.Module, state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors of ``state``, a ``state_dict`` of the model's, by their own names; not copies.

    Raises as ``own_state`` does.
    """
    return own_state(model, {key: value for key, value in state.items() if isinstance(value, torch.Tensor)})


def own_state(model: nn.Module, state: Mapping[str, T]) -> dict[str, T]:
    """Return what the model's names lead to by its own names. Raises ``UsageError`` where two become one."""
    own = own_names(model, state)
    found = {own[name]: value for name, value in state.items()}
    if len(found) < len(state):
        twice = next(name for name, count in Counter(own.values()).items() if count > 1)
        first, second, *_ = (name for name, short in own.items() if short == twice)
        raise UsageError(
            f"{first!r} and {second!r} of the model are both {twice!r} without what wraps it",
            "what is saved goes by such names",
            "give one of them another name",
        )
    return found


def named_as_in(model: nn.Module, own: Mapping[str, T]) -> dict[str, T]:
    """Return by the names of the model's ``state_dict`` what ``own_state`` gave; what the model lacks is left out."""
    names = own_state(model, {name: name for name in model.state_dict(keep_vars=True)})
    return {names[name]: value for name, value in own.items() if name in names}


def own_parameters(model: nn.Module, remove_duplicate: bool = True) -> dict[str, nn.Parameter]:
    """Return the model's parameters by their own names, as ``named_parameters`` does."""
    return own_state(model, dict(model.named_parameters(remove_duplicate=remove_duplicate)))


def own_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the model's buffers by their own names, as ``named_buffers`` does."""
    return own_state(model, dict(model.named_buffers()))


def own_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the model's modules by their own names: of a wrapper and what it wraps the latter."""
    modules = dict(model.named_modules(remove_duplicate=False))
    own = own_names(model, modules)
    # An outer one comes before what is in it.
    return {own[name]: module for name, module in modules.items()}


def _own_name(model: nn.Module, name: str) -> str:
    kept: list[str] = []
    inside: Any = model
    for word in name.split("."):
        # Some wrappers leave themselves out of the names.
        while attribute := _wrapped(inside):
            inside = getattr(inside, attribute)
            if attribute == word:
                break
        else:
            kept.append(word)
            # Not every attribute: to ask for one may run code of the user's.
            held = getattr(inside, "_modules", {})
            inside = held[word] if word in held else None  # noqa: SIM401 - a scripted module's has no get
    return ".".join(kept)


def _wrapped(module: object) -> str | None:
    """The attribute with the model that ``module`` wraps, or ``None`` where it is no wrapper."""
    for kind in type(module).__mro__:
        attribute = WRAPPERS.get(f"{kind.__module__}.{kind.__qualname__}")
        if attribute is not None:
            return attribute
    return None
