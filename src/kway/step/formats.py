"""Memory format of what convolutions of one input channel get, which sizes leave open."""

from contextlib import ExitStack
from types import MethodType
from typing import Any

import torch
from torch import nn

Tensor = torch.Tensor
_LAST: dict[type[nn.Module], torch.memory_format] = {
    nn.Conv2d: torch.channels_last,
    nn.Conv3d: torch.channels_last_3d,
}


def follow_weights(model: nn.Module, undo: ExitStack) -> None:
    """Let convolutions of one input channel whose weights are ``channels_last`` take images as such, until ``undo``.

    Images of one channel lie in both formats at once, and only their strides tell which one is meant: compiled code
    believes them, and brings what is said to be contiguous into the format of the weights, in forward and again in
    backward. No number is moved or changed. Only where a convolution reads them: other operations of the model would
    give their results in the format that they find.
    """
    module: Any
    for module in model.modules():
        last = _LAST.get(type(module))
        held = vars(module)
        if last is None or module.in_channels != 1 or "forward" in held:
            continue
        strides = torch.empty_like(module.weight, device="meta", memory_format=last).stride()
        if module.weight.stride() != strides:
            continue
        # A method: a copy of the layer gets its own.
        held["forward"] = MethodType(_forward, module)
        undo.callback(held.pop, "forward")


def _forward(self: Any, images: Tensor) -> Tensor:
    return type(self).forward(self, _laid(images, self.weight.dim()))  # type: ignore[no-any-return]


# As pickle names it: what is read back has the forward of its class.
_forward.__name__ = "forward"


def _laid(images: Tensor, dimensions: int) -> Tensor:
    plain = type(images) is Tensor and images.layout is torch.strided and not images.is_nested
    if not plain or images.dim() != dimensions or images.shape[1] != 1:
        return images
    # Backward through other strides is slow.
    if images.requires_grad or images.stride(1) == 1 or not images.is_contiguous():
        return images
    return images.as_strided(images.shape, (images.stride(0), 1, *images.stride()[2:]))
