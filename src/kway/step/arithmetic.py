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
        self.packed, self.pooled, self.given, self.moved, self.handed = packed, pooled, given, moved, handed
        self._numbers: dict[tuple[float, torch.device], Tensor] = {}

    def names(self) -> list[str]:
        """List the attributes that are functions."""
        return [name for name in vars(self) if not name.startswith("_")]

    def number(self, value: float, device: torch.device) -> Tensor:
        """Return a number as a tensor of shape (1,) on ``device``, as a rule the same one each time."""
        # As a constant it would be part of compiled code, of which each number would need its own.
        held = (value, device)
        if held in self._numbers:
            return self._numbers[held]
        # The first time is no part of what makes two steps alike.
        with _disable_current_modes():
            made = torch.full((1,), value, dtype=torch.float64, device=device)
        if len(self._numbers) < MOST_NUMBERS:
            self._numbers[held] = made
        return made


def packed(mean: Tensor, var: Tensor, count: Tensor) -> Tensor:
    """Return mean, biased variance (C) and count (1) of a share as one vector, shape (2 C + 1,)."""
    return torch.cat([mean.double(), var.double(), count])


def pooled(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Combine what ``packed`` returns of several shares, shape (shares, 2 C + 1), in their order: mean, var, count."""
    channels = (rows.size(1) - 1) // 2
    means, variances, count = torch.split(rows, [channels, channels, 1], dim=1)
    total = count.sum()
    part = count / total
    mean = (means * part).sum(0)
    away = means - mean
    var = (torch.addcmul(variances, away, away) * part).sum(0)
    return mean, var, total


def given(mean: Tensor, var: Tensor, count: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return mean, inverse deviation and count, shape (1,), as the kernels take them: in ``dtype``, and int32."""
    return mean.to(dtype), (var + eps).rsqrt().to(dtype), count.to(torch.int32).reshape(1)


def moved(running: list[Tensor | None], mean: Tensor, var: Tensor, count: Tensor, factor: Tensor) -> None:
    """Move running mean and variance (``None``: not kept) in place by ``factor`` (1); the variance is made unbiased."""
    # var * count / (count - 1)
    values = mean, torch.addcdiv(var, var, count - 1)
    for kept, value in zip(running, values, strict=True):
        if kept is not None:
            kept.copy_(torch.lerp(kept.double(), value, factor))


def handed(
    rows: Tensor, own: Tensor, invstd: Tensor, weight: torch.dtype | None, bias: torch.dtype | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the sums over all ranks, and the gradients of weight and bias in their dtypes, from this rank's sums.

    ``own``: sum(dy) and sum(dy * (x - mean)), shape (2, C); ``rows``: those of all ranks, shape (ranks, 2, C).
    """
    grad_weight = None if weight is None else (own[1] * invstd).to(weight)
    return rows.sum(0), grad_weight, None if bias is None else own[0].to(bias)
