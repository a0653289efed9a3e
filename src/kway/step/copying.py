"""How modules are copied that hold what ``copy.deepcopy`` refuses: tensors that were computed from parameters."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn


def computed(modules: Iterable[nn.Module]) -> dict[int, Any]:
    """Return a memo for ``copy.deepcopy``: by id, copies of the tensors that layers have computed and hold.

    They come without their history: layers that hold some (of ``nn.utils.weight_norm``, say) compute them anew in each
    forward pass.
    """
    memo: dict[int, Any] = {}
    for module in modules:
        for each in module.modules():
            waiting = list(vars(each).values())
            while waiting:
                value = waiting.pop()
                if isinstance(value, torch.Tensor):
                    if not value.is_leaf:
                        memo[id(value)] = value.detach().clone()
                elif type(value) in (list, tuple):
                    waiting += value
                elif type(value) is dict:
                    waiting += value.values()
    return memo
