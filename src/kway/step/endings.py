"""What becomes of the sum and the weight of a share's losses: functions that are compiled together with a loss."""

from collections.abc import Callable

import torch

Tensor = torch.Tensor
# (total, weight, factor) -> two tensors. ``total`` is a differentiable scalar, ``weight`` one of the same dtype;
# ``factor`` is for what is not divided yet.
Ending = Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor]]


def as_they_are(total: Tensor, weight: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    """Return total and weight."""
    return total, weight


def scaled(total: Tensor, weight: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    """Return what backward begins from, ``total * factor``, and the vector (total, weight), shape (2,)."""
    return total * factor, torch.stack([total.detach(), weight])


def mean(total: Tensor, weight: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    """Return the mean of a whole batch, where backward begins, and the vector (mean, weight, total), shape (3,)."""
    # Of a weight of 0 there is no mean, and no gradient either: not NaN, as 0 times infinity would be.
    objective = total / weight.masked_fill(weight == 0, 1.0)
    value = total.detach()
    return objective, torch.stack([value / weight, weight, value])


def plain(total: Tensor, weight: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    """Return the sum of a whole batch, where backward begins, and the vector (total, weight, total), shape (3,)."""
    value = total.detach()
    # A weight that is no number makes the loss none.
    return total, torch.stack([value + weight * 0, weight, value])
