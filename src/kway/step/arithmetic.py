"""The small arithmetic of batch statistics over ranks: functions of tensors and constants alone.

A compiled step runs each of them as one kernel; one after the other, their operations take a GPU longer to begin than
to do. Statistics are those of C channels, in float64.
"""

import torch
from torch.utils._python_dispatch import _disable_current_modes

Tensor = torch.Tensor
# Numbers that are kept. A share of another size each time would fill memory with them.
MOST_NUMBERS = 256


class Arithmetic:
    """The functions as a step calls them: as they are, or compiled (``StepCore.compilable``)."""

    def __init__(self) -> None:
        self.packed, self.combined = packed, combined
        self._numbers: dict[tuple[float, torch.device, torch.dtype], Tensor] = {}

    def names(self) -> tuple[str, ...]:
        """List the attributes that are functions."""
        return ("packed", "combined")

    def number(self, value: float, device: torch.device, dtype: torch.dtype = torch.float64) -> Tensor:
        """Return a number as a tensor of shape (1,) on ``device``, as a rule the same one each time."""
        # As a constant it would be part of compiled code, of which each number would need its own.
        held = (value, device, dtype)
        if held in self._numbers:
            return self._numbers[held]
        # The first time is no part of what makes two steps alike.
        with _disable_current_modes():
            made = torch.full((1,), value, dtype=dtype, device=device)
        if len(self._numbers) < MOST_NUMBERS:
            self._numbers[held] = made
        return made


def packed(mean: Tensor, var: Tensor, count: Tensor) -> Tensor:
    """Return mean, biased variance (C) and count (1) of a share as one vector, shape (2 C + 1,)."""
    return torch.cat([mean.double(), var.double(), count])


def pooled(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Combine what ``packed`` returns of several shares, shape (shares, 2 C + 1), in their order.

    Return mean, biased variance and count, each of shape (C,): what is alike in shape is one kernel.
    """
    channels = (rows.size(1) - 1) // 2
    means, variances, counts = torch.split(rows, [channels, channels, 1], dim=1)
    counts = counts.expand(-1, channels)
    # Whole numbers, whose sum is exact in any order.
    total = counts.sum(0)
    part = counts / total
    mean = in_order(means * part)
    away = means - mean
    return mean, in_order(torch.addcmul(variances, away, away) * part), total


def in_order(rows: Tensor) -> Tensor:
    """Return the sum of the rows of a tensor (rows, C), one after the other.

    The order is in the code: each rank compiles it by itself, and a compiler is free to choose that of a reduction.
    """
    total, *others = rows.unbind(0)
    for row in others:
        total = total + row
    return total


def combined(
    rows: Tensor,
    running: list[Tensor | None],
    factor: Tensor | None,
    eps: float,
    dtype: torch.dtype,
    sure: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Combine the shares' statistics ``rows`` as ``pooled`` does, move what is running, and return what kernels take.

    ``running``: mean and variance, moved in place by ``factor`` (1), the variance made unbiased; ``None``: not kept, or
    not to be moved. ``sure``: whether any share has a value; where none has, nothing moves, and what is returned leaves
    x as it is. Return mean, inverse deviation and, for a CPU, variance in ``dtype``, and the count as int32, each (C,).
    """
    mean, var, total = pooled(rows)
    some = None if sure else total > 0
    if some is not None:
        mean, var, total = torch.where(some, mean, 0.0), torch.where(some, var, 1.0), total.clamp_min(1)
    # var * count / (count - 1)
    values = mean, torch.addcdiv(var, var, total - 1)
    for kept, value in zip(running, values, strict=True):
        if kept is not None and factor is not None:
            moved = torch.lerp(kept.double(), value, factor)
            kept.copy_(moved if some is None else torch.where(some, moved, kept))
    kept_var = None if rows.is_cuda else var.to(dtype)
    return mean.to(dtype), (var + eps).rsqrt().to(dtype), kept_var, total.to(torch.int32)
