"""Batch normalisation over a group of ranks as a compiler can see it: but for the gathers, plain arithmetic.

What comes before and after it becomes one kernel with it, as on one device. The same collectives as of
``kway.step.normalise``, in the same order: ranks may run one beside the other.
"""

from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from kway.comm.operation import GatherOperation
from kway.step.arithmetic import combined, in_order, packed

Tensor = torch.Tensor


class Chain:
    """Keeps the gathers of a step in one order, forward and backward, whatever a compiler makes of them.

    ``before``: what the last gather of the forward pass returned. ``token``: passed through each layer, so that a
    layer's backward pass comes behind those of the layers after it.
    """

    def __init__(self, device: torch.device) -> None:
        self._first = torch.zeros(1, device=device, requires_grad=True)
        self.before = self.token = self._first

    def begin(self) -> None:
        """Begin a step."""
        self._first.grad = None
        self.before = self.token = self._first


def normalised(module: _BatchNorm, x: Tensor, operation: GatherOperation, chain: Chain, layer: str) -> Tensor:
    """Compute ``module(x)`` in training for x of shape (N, C, ...), with several values a channel, over all ranks' x.

    ``layer``: its name, the same on all ranks.
    """
    channels = x.size(1)
    inner = torch.promote_types(torch.float32, x.dtype)
    dims = [dim for dim in range(x.dim()) if dim != 1]
    # As precise as where nothing is compiled.
    wide = inner if x.is_cuda else torch.float64
    var, mean = torch.var_mean(_of_dtype(x.detach(), wide), dims, correction=0)
    number = torch.full((1,), x.numel() // channels, dtype=torch.float64, device=x.device)
    rows = operation.gather(packed(mean, var, number), chain.before.detach(), layer)
    chain.before = rows
    running: list[Tensor | None] = [None, None]
    factor = None
    if module.track_running_stats:
        if module.num_batches_tracked is not None:
            module.num_batches_tracked.data.add_(1)
        running = [None if kept is None else kept.data for kept in (module.running_mean, module.running_var)]
        factor = torch.full((1,), module.momentum or 0.0, dtype=torch.float64, device=x.device)
    mean, invstd, _, total = combined(rows, running, factor, module.eps, inner, True)
    y, chain.token = _Normalise.apply(  # type: ignore[no-untyped-call]
        x, module.weight, module.bias, mean, invstd, total, chain.token, operation, layer
    )
    normal: Tensor = y
    return normal


class _Normalise(torch.autograd.Function):
    """See ``kway.step.normalise.Normalise``."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor]:
        x, weight, bias, mean, invstd, total, token, operation, layer = args
        scale = invstd if weight is None else invstd * _of_dtype(weight, mean.dtype)
        y = (x - _spread(mean, x)) * _spread(scale, x)
        if bias is not None:
            y = y + _spread(_of_dtype(bias, mean.dtype), x)
        ctx.save_for_backward(x, weight, mean, invstd, total)
        ctx.operation, ctx.layer = operation, layer
        ctx.bias = None if bias is None else bias.dtype
        return _of_dtype(y, x.dtype), token.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        dy, after = grads
        x, weight, mean, invstd, total = ctx.saved_tensors
        dims = [dim for dim in range(x.dim()) if dim != 1]
        wide = mean.dtype if x.is_cuda else torch.float64
        away = x - _spread(mean, x)
        sums = torch.stack([dy.sum(dims, dtype=wide), (dy * away).sum(dims, dtype=wide)])
        rows = ctx.operation.gather(sums, after, ctx.layer)
        average = _of_dtype(in_order(rows) / total, mean.dtype)
        slope = average[1] * invstd * invstd
        scale = invstd if weight is None else invstd * _of_dtype(weight, mean.dtype)
        dx = (dy - _spread(average[0], x) - away * _spread(slope, x)) * _spread(scale, x)
        grad_weight = None if weight is None else _of_dtype(sums[1] * invstd, weight.dtype)
        grad_bias = None if ctx.bias is None else _of_dtype(sums[0], ctx.bias)
        token = _of_dtype(rows.reshape(-1)[:1], after.dtype)
        return _of_dtype(dx, x.dtype), grad_weight, grad_bias, None, None, None, token, None, None


def _of_dtype(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``values`` in ``dtype``. torch 2.11 loses the gradient of what a cast returned that casts nothing."""
    return values if values.dtype == dtype else values.to(dtype)


def _spread(values: Tensor, like: Tensor) -> Tensor:
    return values.view(1, -1, *[1] * (like.dim() - 2))
