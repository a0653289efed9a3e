"""Walk over what a batch may be: tensors in nested tuples, lists, dicts and dataclasses."""

from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import fields, is_dataclass
from typing import Any

import torch


def mapped(
    value: Any, function: Callable[[torch.Tensor], torch.Tensor], copies: dict[int, Any] | None = None
) -> Any:
    """Return ``value`` with every tensor replaced by ``function`` of it; what holds no tensors stays.

    Containers are new ones of the same type: tuples, named tuples, lists, mappings and dataclasses. A dataclass is
    copied with all that it holds, and never made anew: its ``__post_init__`` would compute something a second time.
    Each is copied once, by ``id`` in ``copies``, with the original, so that no other gets its ``id``: they may refer to
    each other.
    """
    copies = {} if copies is None else copies
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, Mapping):
        items = {key: mapped(item, function, copies) for key, item in value.items()}
        return items if type(value) is dict else _rebuilt(value, items)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(mapped(item, function, copies) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(mapped(item, function, copies) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        if id(value) in copies:
            return copies[id(value)][1]
        whole = copy(value)
        copies[id(value)] = value, whole
        for name, part in attributes_of(value).items():
            found = mapped(part, function, copies)
            if found is not part:
                # As frozen ones take it, too.
                object.__setattr__(whole, name, found)
        return whole
    return value


def tensors(
    value: Any, but: tuple[type, ...] = (), seen: dict[int, Any] | None = None
) -> Iterator[torch.Tensor]:
    """Yield every tensor in ``value``, in the order of ``mapped``; unlike that, it makes no container anew.

    ``but``: types that are not looked into. ``seen``: dataclasses that were, by ``id``, and held.
    """
    seen = {} if seen is None else seen
    if isinstance(value, but):
        return
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from (tensor for item in value.values() for tensor in tensors(item, but, seen))
    elif isinstance(value, list | tuple):
        yield from (tensor for item in value for tensor in tensors(item, but, seen))
    elif is_dataclass(value) and not isinstance(value, type) and id(value) not in seen:
        seen[id(value)] = value
        yield from (tensor for part in attributes_of(value).values() for tensor in tensors(part, but, seen))


def attributes_of(value: Any) -> dict[str, Any]:
    """Return what a dataclass holds, by name: its fields, also those that it computes, and what it has beside them."""
    names = dict.fromkeys([*(field.name for field in fields(value)), *getattr(value, "__dict__", ())])
    return {name: getattr(value, name) for name in names if hasattr(value, name)}


def _rebuilt(value: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    try:
        return type(value)(items)  # type: ignore[call-arg]
    except TypeError:
        return items
