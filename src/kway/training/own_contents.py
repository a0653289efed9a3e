"""What functions of a copy hold: what of it is copied in a way of its own, and what stays shared."""

from collections.abc import Mapping
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from kway.step.copying import computed
from kway.step.reach import walked


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
