"""How modules are copied that hold what ``copy.deepcopy`` refuses: tensors that were computed from parameters."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from kway.step.reach import walked

_LEAVES = (torch.Tensor, np.ndarray, Dataset, DataLoader)


def computed(modules: Iterable[nn.Module]) -> dict[int, Any]:
    """Return a memo for ``copy.deepcopy``: by id, copies of the tensors that layers have computed and hold.

    They come without their history: layers that hold some (of ``nn.utils.weight_norm``, say) compute them anew in each
    forward pass.
    """
    parts = (each for module in modules for each in module.modules())
    held = walked(parts, lambda value: issubclass(type(value), _LEAVES))
    return {
        id(value): value.detach().clone()
        for value in held
        if issubclass(type(value), torch.Tensor) and not value.is_leaf
    }
