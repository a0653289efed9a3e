"""What functions of a replica hold: what of it is copied in a way of its own, and what all replicas share."""

from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from kway.step.copying import computed

ATOMS = (str, bytes, int, float, bool, complex, type(None), type, torch.device, torch.dtype)
CONTAINERS = (dict, list, set, deque)


def entries(content: Any, known: Mapping[int, Any]) -> dict[int, Any]:
    """Return a memo of what ``copy.deepcopy`` would refuse in ``content``, or should not copy.

    That is data, modules, and what cleans up after itself. ``known``: ids of what is not looked into.
    """
    memo: dict[int, Any] = {}
    for value in walked([content], _is_left, known):
        kind = type(value)
        if issubclass(kind, torch.Generator):
            memo[id(value)] = generator_like(value)
        elif issubclass(kind, torch.Tensor):
            if not value.is_leaf:
                memo[id(value)] = value.detach().clone()
        elif issubclass(kind, nn.Module):
            memo |= computed([value])
        elif _is_shared(value):
            memo[id(value)] = value
    return memo


def _is_shared(value: Any) -> bool:
    # By type: to be asked for its class, a value may raise (a weak proxy of what is gone).
    kind = type(value)
    if issubclass(kind, Dataset | DataLoader):
        return not issubclass(kind, IterableDataset)
    # What cleans up when it goes (files do) must do so once.
    if issubclass(kind, ModuleType) or hasattr(kind, "__del__"):
        return True
    return issubclass(kind, np.ndarray) and not value.flags.writeable


def _is_left(value: Any) -> bool:
    return issubclass(type(value), nn.Module | torch.Tensor) or _is_shared(value)


def generator_like(own: torch.Generator) -> torch.Generator:
    """Return a generator that draws what ``own`` would draw next."""
    made = torch.Generator(own.device)
    made.set_state(own.get_state())
    return made


def walked(roots: Iterable[Any], leaves: Callable[[Any], bool], known: Container[int] = ()) -> Iterator[Any]:
    """Yield what lies in ``roots``, and these.

    ``leaves`` says what is not looked into; ``known``: ids that are left out.
    """
    waiting, seen = [*roots], set[int]()
    while waiting:
        value = waiting.pop()
        kind = type(value)
        if id(value) in known or id(value) in seen or issubclass(kind, ATOMS):
            continue
        seen.add(id(value))
        yield value
        if leaves(value):
            continue
        if issubclass(kind, dict):
            waiting += value.values()
        elif issubclass(kind, (tuple, *CONTAINERS)):
            waiting += value
        waiting += table_of(value).values()


def table_of(value: Any) -> dict[str, Any]:
    """Return the attributes of ``value``, to be read or written: none where it has no table of them."""
    try:
        held = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return held if isinstance(held, dict) else {}
