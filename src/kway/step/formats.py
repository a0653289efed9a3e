"""Memory formats of a model's inputs, where their sizes leave open which one they have."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from kway.data.structure import mapped

Tensor = torch.Tensor
_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def as_weights_are(model: nn.Module) -> Callable[[Any], Any]:
    """Return what gives images of one channel the strides of ``channels_last``, if the model's weights are so.

    Such images lie in both formats at once, and only their strides tell which one is meant: compiled code believes
    them, and brings what is said to be contiguous into the format of the weights, in forward and again in backward.
    No number is moved or changed. Takes tensors and what holds them.
    """
    formats = {
        weight.dim(): _LAST[weight.dim()]
        for weight in model.parameters()
        if weight.dim() in _LAST
        and weight.is_contiguous(memory_format=_LAST[weight.dim()])
        and not weight.is_contiguous()
    }
    if not formats:
        return lambda value: value

    def laid(tensor: Tensor) -> Tensor:
        wanted = formats.get(tensor.dim())
        if wanted is None or type(tensor) is not Tensor or tensor.requires_grad or not tensor.is_contiguous():
            return tensor
        if not tensor.is_contiguous(memory_format=wanted):
            return tensor
        strides = torch.empty_like(tensor, device="meta", memory_format=wanted).stride()
        # .data: a tensor of its own for autograd, no view.
        return tensor if tensor.stride() == strides else tensor.as_strided(tensor.shape, strides).data

    return lambda value: mapped(value, laid)
