"""Running statistics of batch normalisation, moved as torch does."""

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from kway.step.arithmetic import Arithmetic

Tensor = torch.Tensor
Running = list[Tensor | None]


def count_batch(
    module: _BatchNorm, arithmetic: Arithmetic, device: torch.device
) -> tuple[Running, Tensor | None]:
    """Count one more batch, and return the running statistics of a layer with the weight of the batch in them.

    They are moved at once: whatever runs next, the layer itself in another mode or code of the user's, may look at
    them. Torch counts a batch without any value as well.
    """
    if module.num_batches_tracked is not None:
        module.num_batches_tracked.data.add_(1)
    factor = weight_of_batch(module)
    if factor is None:
        return [None, None], None
    # Past autograd, as torch's own kernel: what was computed with the old values keeps its backward pass.
    running = [None if kept is None else kept.data for kept in (module.running_mean, module.running_var)]
    return running, arithmetic.number(factor, device)


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
