"""How a batch reaches the model and the loss."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from kway.data.structure import mapped
from kway.errors import UsageError
from kway.step.precision import widened

TARGET_KEYS = ("target", "label", "labels")


def move(value: Any, device: torch.device, floating: torch.dtype | None = None) -> Any:
    """Copy every tensor in nested tuples, lists, dicts and dataclasses to ``device``.

    ``floating``: the dtype that real floating-point tensors get, and complex ones as wide; ``None`` leaves
    them as they are.
    """

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        dtype = tensor.dtype if floating is None else widened(tensor.dtype, floating)
        return tensor.to(device=device, dtype=dtype, non_blocking=tensor.is_pinned())

    return mapped(value, moved)


Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Call = tuple[tuple[Any, ...], dict[str, Any], Any]


def splitter(inputs: Any, target: Any, has_loss: bool) -> Callable[[Any], Call]:
    """Return a function that turns a batch into (args, kwargs, target).

    They are for ``loss(model(*args, **kwargs), target)``. ``inputs`` and ``target`` are those of the job.
    Without a loss the model gets the whole batch.
    The returned function raises ``UsageError`` for a batch in which it finds no target.
    """

    def split(batch: Any) -> Call:
        if inputs is None and target is None:
            return _by_convention(batch, has_loss)
        goal = _pick(batch, target) if target is not None else _default_target(batch, has_loss)
        chosen = _pick(batch, inputs) if inputs is not None else _without(batch, target)
        args, kwargs = _as_call(chosen)
        return args, kwargs, goal

    return split


def caller(inputs: Any, target: Any, has_loss: bool) -> Callable[[Any], Arguments]:
    """Return a function that turns a batch into (args, kwargs) for the model alone, for prediction.

    As ``splitter``, but the batch need not hold a target: where none is found, and for a tensor that is alone,
    all of it is for the model.
    """

    def call(batch: Any) -> Arguments:
        if inputs is not None and (callable(inputs) or not isinstance(batch, torch.Tensor)):
            return _as_call(_pick(batch, inputs))
        if isinstance(batch, torch.Tensor) or (not has_loss and target is None):
            return _as_call(batch)
        return _as_call(_rest(batch, target))

    return call


def _rest(batch: Any, target: Any) -> Any:
    """Return what a batch holds beside the target, which may not be there."""
    if target is None:
        keys: list[Any] = [key for key in TARGET_KEYS if isinstance(batch, Mapping) and key in batch][:1]
    else:
        keys = list(target) if isinstance(target, list | tuple) else [target]
    if isinstance(batch, Mapping):
        if any(callable(key) for key in keys):
            return _without(batch, target)
        return {key: item for key, item in batch.items() if key not in keys}
    if isinstance(batch, list | tuple) and keys and all(isinstance(key, int) for key in keys):
        found = [key for key in keys if -len(batch) <= key < len(batch)]
        return _without(batch, found) if found else batch
    return batch[:-1] if isinstance(batch, list | tuple) and len(batch) > 1 else batch


def _by_convention(batch: Any, has_loss: bool) -> Call:
    if not has_loss:
        args, kwargs = _as_call(batch)
        return args, kwargs, None
    goal = _default_target(batch, has_loss)
    if isinstance(batch, Mapping):
        key = next(key for key in TARGET_KEYS if key in batch)
        return (), {str(k): v for k, v in batch.items() if k != key}, goal
    return tuple(batch[:-1]), {}, goal


def _default_target(batch: Any, has_loss: bool) -> Any:
    if not has_loss:
        return None
    if isinstance(batch, Mapping):
        for key in TARGET_KEYS:
            if key in batch:
                return batch[key]
        raise UsageError(
            f"a batch with the keys {', '.join(map(str, batch))}",
            f"the target is looked for under {', '.join(TARGET_KEYS)}",
            "name it with target=",
        )
    if isinstance(batch, list | tuple) and len(batch) > 1:
        return batch[-1]
    raise UsageError(
        f"a batch that is a {type(batch).__name__}",
        "the target is the last element of a tuple, or a key of a dict",
        "name both parts with inputs= and target=",
    )


def _pick(batch: Any, how: Any) -> Any:
    if callable(how):
        return how(batch)
    if isinstance(how, list | tuple):
        chosen = [_pick(batch, key) for key in how]
        return dict(zip(how, chosen, strict=True)) if isinstance(batch, Mapping) else tuple(chosen)
    try:
        return getattr(batch, how) if isinstance(how, str) and not isinstance(batch, Mapping) else batch[how]
    except (KeyError, IndexError, AttributeError, TypeError):
        has = f", which has {', '.join(map(str, batch))}" if isinstance(batch, Mapping) else ""
        raise UsageError(
            f"no {how!r} in a batch that is a {type(batch).__name__}{has}",
            "inputs= and target= name its parts",
        ) from None


def _without(batch: Any, key: Any) -> Any:
    """Return what is left of a batch for the model once the target is taken out."""
    keys = list(key) if isinstance(key, list | tuple) else [key]
    if isinstance(batch, Mapping):
        if callable(key):
            raise UsageError(
                "target= is a function of a dict", "what is left for the model?", "pass inputs= as well"
            )
        return {k: v for k, v in batch.items() if k not in keys}
    if isinstance(batch, list | tuple) and all(isinstance(k, int) for k in keys):
        places = {k % len(batch) for k in keys}
        return tuple(item for at, item in enumerate(batch) if at not in places)
    if isinstance(batch, list | tuple) and len(batch) > 1:
        return tuple(batch[:-1])
    return batch


def _as_call(chosen: Any) -> Arguments:
    if isinstance(chosen, Mapping):
        return (), {str(key): item for key, item in chosen.items()}
    if isinstance(chosen, tuple | list):
        return tuple(chosen), {}
    return (chosen,), {}
