"""Sums and weights by name, added over micro-batches, steps and ranks. Means are taken once, at the end."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from kway.comm.group import Group
from kway.errors import UsageError

Tensor = torch.Tensor


class Tally:
    """Adds (sum, weight) pairs in float64 on ``device``, without reading anything back before ``result``.

    Each of ``rows`` shares has a row of its own, so that the total does not depend on who held which share.
    """

    def __init__(self, names: list[str], device: torch.device, rows: int = 1) -> None:
        self.names, self.device = names, device
        self._sums = torch.zeros(rows, len(names), 2, dtype=torch.float64, device=device)

    def add(self, name: str, total: Tensor, weight: Tensor, row: int = 0) -> None:
        """Add one pair of scalars to a share's row."""
        pair = torch.stack([total.detach().double(), weight.detach().double()])
        self._sums[row, self.names.index(name)] += pair

    def result(self, group: Group) -> dict[str, tuple[float, float]]:
        """Return {name: (sum, weight)} over all shares, added in their order. A collective.

        Every row is written by one rank and zero on the others, so that summing over ranks is exact.
        """
        added = group.sum_(self._sums.clone()).sum(0).tolist()
        return {name: (pair[0], pair[1]) for name, pair in zip(self.names, added, strict=True)}


def mean(pair: tuple[float, float]) -> float:
    """Return sum / weight, NaN where nothing was weighed."""
    return pair[0] / pair[1] if pair[1] else float("nan")


@torch.no_grad()
def measure(
    metrics: Mapping[str, Callable[..., Any]],
    output: Any,
    target: Any,
    samples: int,
    tally: Tally,
    row: int = 0,
) -> None:
    """Add every metric of one share of ``samples`` samples to its row of ``tally``.

    A metric returns per-sample values of any shape, a pair (sum, weight), or a scalar, which counts once a
    sample. Raises ``UsageError`` for anything else.
    """
    for name, metric in metrics.items():
        value = metric(output, target)
        if isinstance(value, tuple | list) and len(value) == 2:
            total, weight = (torch.as_tensor(part, dtype=torch.float64) for part in value)
        elif isinstance(value, torch.Tensor | int | float):
            values = torch.as_tensor(value).detach().double()
            count = samples if values.dim() == 0 else values.numel()
            total = values.sum() * (samples if values.dim() == 0 else 1)
            weight = torch.tensor(float(count), dtype=torch.float64)
        else:
            raise UsageError(
                f"metric {name!r} returned a {type(value).__name__}",
                "it must return per-sample values, a pair (sum, weight) or a number",
            )
        device = tally.device
        tally.add(name, total.to(device), weight.to(device), row)


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    """Return 1.0 for each sample whose largest output is at the target class, else 0.0.

    ``output``: (N, classes, ...); ``target``: class indices (N, ...) or class probabilities like ``output``.
    """
    classes = target.argmax(1) if target.is_floating_point() else target
    return (output.argmax(1) == classes).double()
