"""A model's own names, whatever wraps it: files from wrapped and bare models are the same."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from kway.errors import UsageError

# The attribute under which each wrapper holds the model. By name: importing some of these takes a second.
WRAPPERS = {
    "torch.nn.parallel.data_parallel.DataParallel": "module",
    "torch.nn.parallel.distributed.DistributedDataParallel": "module",
    "torch._dynamo.eval_frame.OptimizedModule": "_orig_mod",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.CheckpointWrapper": "_checkpoint_wrapped_module",
}


def own_name(model: nn.Module, name: str) -> str:
    """Return the name that a parameter or buffer of ``model`` has without wrappers.

    Wrappers are known by their class, at any depth: a user's module that is called ``module`` keeps its name.
    """
    kept, inside = [], model
    for word in name.split("."):
        if _wrapped(inside) == word:
            inside = getattr(inside, word)
            continue
        while isinstance(inside, nn.Module) and (attribute := _wrapped(inside)):
            inside = getattr(inside, attribute)  # a wrapper that leaves itself out of the names
        kept.append(word)
        inside = getattr(inside, word, inside)
    return ".".join(kept)


def own_weights(model: nn.Module, state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors of ``state``, the model's ``state_dict(keep_vars=True)``, by their own names; not copies."""
    tensors = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
    if not any(_wrapped(module) for module in model.modules()):
        return tensors  # a training loop asks between two steps: to follow each name would take milliseconds
    return {own_name(model, key): value for key, value in tensors.items()}


def load_own_weights(model: nn.Module, weights: Mapping[str, torch.Tensor], source: object) -> None:
    """Load tensors by their own names into a bare or wrapped model, each to where the model's tensor is.

    Raises ``UsageError``, with the model unchanged, where names or shapes differ.
    """
    state = model.state_dict(keep_vars=True)
    own = {own_name(model, key): key for key, value in state.items() if isinstance(value, torch.Tensor)}
    missing, extra = sorted(own.keys() - weights.keys()), sorted(weights.keys() - own.keys())
    if own and not own.keys() & weights.keys():
        raise UsageError(
            f"weights {source}: none of their {len(weights)} names is the model's",
            f"names like {_few(list(own))} are needed, they are like {_few(extra)}",
        )
    if missing or extra:
        raise UsageError(
            f"weights {source}: missing {_few(missing)}; not in the model {_few(extra)}",
            f"they must have the model's {len(own)} names",
        )
    for name, key in own.items():
        if state[key].shape != weights[name].shape:
            raise UsageError(
                f"weights {source}: {name!r} has shape {tuple(weights[name].shape)}",
                f"the model has {tuple(state[key].shape)}",
            )
    model.load_state_dict({own[name]: value for name, value in weights.items()}, strict=False)


def _wrapped(module: object) -> str | None:
    """The attribute with the model that ``module`` wraps, or ``None`` where it is no wrapper."""
    for kind in type(module).__mro__:
        attribute = WRAPPERS.get(f"{kind.__module__}.{kind.__qualname__}")
        if attribute is not None:
            return attribute
    return None


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "") or "none"
