"""The arithmetic of batch normalisation over a group of ranks, forward and backward.

Each rank contributes count, mean and variance of its share. They are gathered in rank order and combined in
float64 (Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances",
1979), so that every rank holds the same bits. The backward pass is that of Ioffe and Szegedy, "Batch
normalization" (2015), section 3, with the sums of dy and of dy * (x - mean) taken over the group.

Shapes: x is (N, C, ...); statistics are (C,).
"""

from typing import Any

import torch

from kway.comm.group import Group
from kway.step.accompany import refuse_second_derivative
from kway.step.arithmetic import Arithmetic

Tensor = torch.Tensor


def spread(values: Tensor, like: Tensor) -> Tensor:
    """Shape per-channel values (C,) so that they broadcast over (N, C, ...)."""
    return values.view(1, -1, *[1] * (like.dim() - 2))


def gather_statistics(x: Tensor, group: Group, counts: bool, arithmetic: Arithmetic, layer: str) -> Tensor:
    """Return the statistics of all ranks' x as ``packed``, a row a rank, float64.

    A rank whose share does not count contributes nothing. ``layer``: its name, the same on all ranks.
    """
    channels = x.size(1)
    values = x.numel() // channels if counts and channels else 0
    if values:
        local = arithmetic.packed(*local_statistics(x), arithmetic.number(values, x.device))
    else:
        local = torch.zeros(2 * channels + 1, dtype=torch.float64, device=x.device)
    return group.stack(local, layer)


def local_statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and biased variance by channel of one rank's x, at least in float32."""
    values = x.detach()
    if not x.is_cuda:
        # On a CPU torch sums in float64 and then rounds to the dtype of x. Rounded here and again after the ranks
        # are combined, the mean of a layer could differ from that of one device, and flip a ReLU behind it.
        values = values.double()
    mean, var = torch.batch_norm_update_stats(values, None, None, 0.0)
    return mean, var


class Normalise(torch.autograd.Function):
    """``apply(x, weight, bias, statistics, eps, group, counts, layer)``.

    y = (x - mean) / sqrt(var + eps) * weight + bias.
    ``statistics``: see ``arithmetic.met``. The gradient flows through the statistics of the whole group: backward is a
    collective. The gradients of weight and bias are those of this rank's share, as for any other parameter.
    """

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        """Normalise this rank's x."""
        x, weight, bias, (mean, invstd, var, total), eps, group, counts, layer = args
        x = x if _last(x) else x.contiguous()
        ctx.save_for_backward(x, weight, mean, invstd, total[:1])
        ctx.group, ctx.counts, ctx.layer = group, counts, layer
        ctx.bias_dtype = None if bias is None else bias.dtype
        if not x.numel():
            return torch.empty_like(x)
        if x.is_cuda:
            return torch.batch_norm_elemt(x, weight, bias, mean, invstd, eps)
        # Beside wide statistics the CPU's kernel takes wide weights alone.
        weight, bias = (None if value is None else value.to(mean.dtype) for value in (weight, bias))
        var = variance_of(invstd, var, eps)
        return torch.nn.functional.batch_norm(x, mean, var, weight, bias, False, 0.0, eps)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        """Return the gradients of x, weight and bias."""
        refuse_second_derivative("batch normalisation over the global batch")
        ctx.met = True
        x, weight, mean, invstd, total = ctx.saved_tensors
        dy = grads[0].contiguous(memory_format=torch.channels_last) if _last(x) else grads[0].contiguous()
        sums, grad_weight, grad_bias = _local_sums(dy, x, weight, ctx.bias_dtype, mean, invstd)
        if not ctx.counts:
            for value in (sums, grad_weight, grad_bias):
                if value is not None:
                    value.zero_()
        over_group = ctx.group.stack(sums, ctx.layer).sum(0)
        if not x.numel():
            dx = torch.zeros_like(x)
        elif x.is_cuda:
            scale = None if weight is None else weight.to(mean.dtype)
            sum_dy, sum_dy_xmu = over_group.unbind(0)
            dx = torch.batch_norm_backward_elemt(dy, x, mean, invstd, scale, sum_dy, sum_dy_xmu, total)
        else:
            average = over_group / total
            slope = (average[1] * invstd * invstd).to(mean.dtype)
            scale = invstd if weight is None else invstd * weight
            rest = dy - spread(average[0].to(mean.dtype), x)
            rest.addcmul_(x - spread(mean, x), spread(slope, x), value=-1)
            dx = rest.mul_(spread(scale, x)).to(x.dtype)
        return dx, grad_weight, grad_bias, None, None, None, None, None


def variance_of(invstd: Tensor, var: Tensor, eps: float) -> Tensor:
    """Return a variance for which torch's own 1 / sqrt(var + eps), rounded at every step, gives ``invstd``.

    torch's kernel for given statistics takes a variance, its kernel for training the inverse deviation in one
    rounding from float64. With this, k devices normalise with the bits of one. Where none of the neighbours of
    ``var`` gives it, ``var`` itself serves.
    """
    info = torch.finfo(var.dtype)
    steps = torch.arange(-4, 5, dtype=var.dtype, device=var.device).view(-1, 1)
    near = (var * (1 + steps * info.eps)).clamp_min(0)
    found = (torch.ones_like(near) / torch.sqrt(near + eps)) == invstd
    chosen = near.gather(0, found.to(torch.int8).argmax(0, keepdim=True)).squeeze(0)
    return torch.where(found.any(0), chosen, var)


def _last(x: Tensor) -> bool:
    return x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()


def _local_sums(
    dy: Tensor, x: Tensor, weight: Tensor | None, bias: torch.dtype | None, mean: Tensor, invstd: Tensor
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return sum(dy) and sum(dy * (x - mean)) over this rank's share, shape (2, C), in a wide dtype.

    And the gradients of weight and bias, a bias of dtype ``bias``; ``None`` where there is none.
    """
    grad_weight = grad_bias = None
    if not x.numel():
        # As the others' are, with which these are gathered.
        sums = torch.zeros(2, x.size(1), dtype=mean.dtype if x.is_cuda else torch.float64, device=x.device)
    elif x.is_cuda:
        # The kernel has both gradients at hand.
        asked = weight is not None, weight is not None and bias == weight.dtype
        found = torch.batch_norm_backward_reduce(dy, x, mean, invstd, weight, True, *asked)
        sums = torch.stack(found[:2])
        grad_weight, grad_bias = (
            value if wanted else None for value, wanted in zip(found[2:], asked, strict=True)
        )
    else:
        dims = [dim for dim in range(x.dim()) if dim != 1]
        centred = x - spread(mean, x)
        wide = torch.float64
        sums = torch.stack([dy.sum(dims, dtype=wide), centred.mul_(dy).sum(dims, dtype=wide)])
    if grad_weight is None and weight is not None:
        grad_weight = (sums[1] * invstd).to(weight.dtype)
    if grad_bias is None and bias is not None:
        # Not the sums themselves: what is sent may be zeroed or added to.
        grad_bias = sums[0].to(bias, copy=True)
    return sums, grad_weight, grad_bias
