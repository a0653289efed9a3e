"""Running statistics of batch normalisation, moved as torch does: of all layers together, once they are known.

A layer has some ten small operations there, which take longer to launch than to compute.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import _disable_current_modes

Tensor = torch.Tensor


@dataclass(frozen=True)
class Statistics:
    """Mean and biased variance by channel of the group's batch, and the count of values a channel.

    All are float64 tensors on the batch's device; nothing is read back to the host.
    """

    mean: Tensor
    var: Tensor
    count: Tensor


class RunningStatistics:
    """Moves the running statistics of layers: at once, or together at the end of what is done inside ``together``."""

    def __init__(self) -> None:
        self._open: list[tuple[_BatchNorm, Statistics]] | None = None
        # Which of several layers a channel belongs to, by the widths of the layers.
        self._layer_of: dict[tuple[int, ...], Tensor] = {}

    @contextmanager
    def together(self) -> Iterator[None]:
        """While open, layers are noted. They move where nothing has failed until the end."""
        self._open = []
        try:
            yield
            self._settle()
        finally:
            self._open = None

    def move(self, module: _BatchNorm, statistics: Statistics) -> None:
        """Count one more batch for a layer, and move its statistics, the variance unbiased."""
        if self._open is None or module.momentum is None:
            self._move([(module, statistics)])
            return
        if any(module is other for other, _ in self._open):
            # A layer that is used twice moves twice, one after the other.
            self._settle()
        self._open.append((module, statistics))

    def _settle(self) -> None:
        groups: dict[tuple[float | None, torch.dtype | None], list[tuple[_BatchNorm, Statistics]]] = {}
        for module, statistics in self._open or ():
            dtype = None if module.running_mean is None else module.running_mean.dtype
            groups.setdefault((module.momentum, dtype), []).append((module, statistics))
        for group in groups.values():
            self._move(group)
        self._open = []

    @torch.no_grad()
    def _move(self, noted: list[tuple[_BatchNorm, Statistics]]) -> None:
        """Move layers of one momentum and dtype."""
        modules = [module for module, _ in noted]
        if counted := [m.num_batches_tracked for m in modules if m.num_batches_tracked is not None]:
            torch._foreach_add_(counted, 1)
        factor = weight_of_batch(modules[0])
        if factor is None or modules[0].running_mean is None:
            return
        counts = torch.stack([statistics.count for _, statistics in noted])
        ratio = (counts / (counts - 1)).index_select(0, self._places(modules))
        unbiased = torch.cat([statistics.var for _, statistics in noted]) * ratio
        means = [statistics.mean for _, statistics in noted]
        running = [*(m.running_mean for m in modules), *(m.running_var for m in modules)]
        move_together([r for r in running if r is not None], torch.cat([*means, unbiased]), factor)

    def _places(self, modules: list[_BatchNorm]) -> Tensor:
        widths = tuple(module.num_features for module in modules)
        found = self._layer_of.get(widths)
        if found is None:
            device = modules[0].running_mean.device if modules[0].running_mean is not None else None
            # Made once, and so no part of what makes two steps alike: see ``observe``. Nothing waits for it.
            with _disable_current_modes():
                found = torch.cat([torch.full((w,), n, device=device) for n, w in enumerate(widths)])
            self._layer_of[widths] = found
        return found


def move_together(running: list[Tensor], values: Tensor, factor: float) -> None:
    """Move tensors of one dtype by ``factor`` towards ``values``, in float64 and one after the other in one vector."""
    moved = torch.cat(running).double() * (1 - factor) + values * factor
    torch._foreach_copy_(running, list(torch.split(moved.to(running[0].dtype), [len(t) for t in running])))


def weight_of_batch(module: _BatchNorm) -> float | None:
    """Return by how much a batch that is counted already moves the running statistics."""
    if module.momentum is None and module.num_batches_tracked is not None:
        return 1.0 / float(module.num_batches_tracked)
    return module.momentum
