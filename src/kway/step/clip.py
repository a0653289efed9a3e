"""Clipping of gradients, some of which may be sparse."""

from collections.abc import Sequence

import torch
from torch import nn


def clip_gradients(parameters: Sequence[nn.Parameter], kind: str, limit: float) -> None:
    """Clip the gradients of ``parameters``, as one vector by its norm or each number by its value, in place.

    As torch does, and also for sparse gradients: their missing rows are zeros, and a row that came several times
    counts with its sum.
    """
    held = [_stand_in(parameter) for parameter in parameters if parameter.grad is not None]
    if not held:
        return
    if kind == "norm":
        nn.utils.clip_grad_norm_(held, limit)
    else:
        nn.utils.clip_grad_value_(held, limit)


def _stand_in(parameter: nn.Parameter) -> nn.Parameter:
    """Return what holds the numbers of a gradient as a dense tensor that shares them."""
    grad = parameter.grad
    if grad is None or not grad.is_sparse:
        return parameter
    parameter.grad = grad.coalesce()
    values: torch.Tensor = parameter.grad.values()
    holder = nn.Parameter(values, requires_grad=False)
    holder.grad = values
    return holder
