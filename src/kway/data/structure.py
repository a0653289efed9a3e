"""Walk over what a batch may be: tensors in nested tuples, lists, dicts and dataclasses."""

from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch


def mapped(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return ``value`` with every tensor replaced by ``function`` of it; what holds no tensors stays.

    Containers are new ones of the same type: tuples, named tuples, lists, mappings and dataclasses. A dataclass in
    which nothing changes is copied as it is, without ``__post_init__``: a batch may be walked over twice.
    """
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, Mapping):
        items = {key: mapped(item, function) for key, item in value.items()}
        return items if type(value) is dict else _rebuilt(value, items)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(mapped(item, function) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(mapped(item, function) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        return _dataclass(value, function)
    return value


def tensors(value: Any, but: tuple[type, ...] = ()) -> Iterator[torch.Tensor]:
    """Yield every tensor in ``value``, in the order of ``mapped``; unlike that, it makes no container anew.

    ``but``: types that are not looked into.
    """
    if isinstance(value, but):
        return
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from (tensor for item in value.values() for tensor in tensors(item, but))
    elif isinstance(value, list | tuple):
        yield from (tensor for item in value for tensor in tensors(item, but))
    elif is_dataclass(value) and not isinstance(value, type):
        yield from (
            tensor for f in fields(value) if f.init for tensor in tensors(getattr(value, f.name), but)
        )


def _rebuilt(value: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    try:
        return type(value)(items)  # type: ignore[call-arg]
    except TypeError:
        return items


def _dataclass(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    moved = False

    def noting(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal moved
        found = function(tensor)
        moved = moved or found is not tensor
        return found

    items = {f.name: mapped(getattr(value, f.name), noting) for f in fields(value) if f.init}
    return replace(value, **items) if moved else copy(value)
