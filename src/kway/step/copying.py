"""How modules are copied that hold what ``copy.deepcopy`` refuses: tensors that were computed from parameters."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.hooks import RemovableHandle

from kway.step.reach import walked

_LEAVES = (torch.Tensor, np.ndarray, Dataset, DataLoader)


def computed(modules: Iterable[nn.Module]) -> dict[int, Any]:
    """Return a memo for ``copy.deepcopy``: by id, copies of the tensors that layers have computed and hold.

    They come without their history: layers that hold some (of ``nn.utils.weight_norm``, say) compute them anew in each
    forward pass.
    """
    parts = (each for module in modules for each in module.modules())
    held = walked(parts, _is_leaf)
    return {
        id(value): value.detach().clone()
        for value in held
        if issubclass(type(value), torch.Tensor) and not value.is_leaf
    }


def apart(value: Any) -> dict[int, Any]:
    """Return a memo for ``copy.deepcopy`` of a loss, or of what one holds, apart from the model that trains.

    Beside what was ``computed``, handles of hooks on what is not of the loss itself: they stay, and remove these.
    """
    modules = [*value.modules()] if isinstance(value, nn.Module) else []
    own = {id(table) for module in modules for table in vars(module).values()}
    handles = (each for each in walked([value], _is_leaf) if type(each) is RemovableHandle)
    return computed(modules[:1]) | {
        id(each): each for each in handles if id(each.hooks_dict_ref()) not in own
    }


def _is_leaf(value: Any) -> bool:
    return issubclass(type(value), _LEAVES)
