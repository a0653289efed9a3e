"""Running statistics of batch normalisation, moved as torch does."""

from dataclasses import dataclass

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from kway.step.arithmetic import Arithmetic

Tensor = torch.Tensor


@dataclass(frozen=True)
class Statistics:
    """Mean and biased variance by channel of the group's batch, and the count of values a channel.

    All are float64 tensors on the batch's device; nothing is read back to the host.
    """

    mean: Tensor
    var: Tensor
    count: Tensor

    def or_nothing(self) -> "tuple[Statistics, Tensor]":
        """Return numbers that leave x as it is where there is no value at all, and whether there is one."""
        some = self.count > 0
        mean, var = torch.where(some, self.mean, 0.0), torch.where(some, self.var, 1.0)
        return Statistics(mean, var, self.count.clamp_min(1)), some


@torch.no_grad()
def move(
    module: _BatchNorm, statistics: Statistics, arithmetic: Arithmetic, some: Tensor | None = None
) -> None:
    """Count one more batch, and move the running statistics of a layer: the variance unbiased.

    ``some``: whether there was any value, ``None`` where that is known. Torch counts a batch without, and moves nothing
    else.

    At once: whatever runs next, the layer itself in another mode or code of the user's, may look at them.
    """
    if module.num_batches_tracked is not None:
        module.num_batches_tracked.add_(1)
    factor = weight_of_batch(module)
    if factor is None:
        return
    # Past autograd, as torch's own kernel: what was computed with the old values keeps its backward pass.
    running = [None if kept is None else kept.data for kept in (module.running_mean, module.running_var)]
    before = None if some is None else [None if kept is None else kept.clone() for kept in running]
    by = arithmetic.number(factor, statistics.mean.device)
    arithmetic.moved(running, statistics.mean, statistics.var, statistics.count, by)
    for kept, old in zip(running, before or (), strict=False):
        if kept is not None and old is not None and some is not None:
            kept.copy_(torch.where(some, kept, old))


def width_of(module: _BatchNorm) -> int | None:
    """Return how many channels a layer has, or ``None`` where it has no tensor that says so and takes any number."""
    held = (module.weight, module.running_mean, module.running_var)
    return next((len(tensor) for tensor in held if tensor is not None), None)


def move_together(running: list[Tensor], values: Tensor, factor: float) -> None:
    """Move tensors of one dtype by ``factor`` towards ``values``, in float64 and one after the other in one vector."""
    moved = torch.cat(running).double() * (1 - factor) + values * factor
    torch._foreach_copy_(running, list(torch.split(moved.to(running[0].dtype), [len(t) for t in running])))


def weight_of_batch(module: _BatchNorm) -> float | None:
    """Return by how much a batch that is counted already moves the running statistics."""
    if module.momentum is None and module.num_batches_tracked is not None:
        return 1.0 / float(module.num_batches_tracked)
    return module.momentum
