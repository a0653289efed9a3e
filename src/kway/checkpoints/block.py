"""One piece of memory in which tensors of any dtype lie one after the other.

One copy then moves all of them, where each by itself would cost a launch.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

_ALIGNED_TO = 256  # bytes, as torch's own allocator aligns on a GPU


@dataclass(frozen=True)
class Place:
    """Where a tensor lies: ``start`` and ``size`` in bytes; ``strides`` those of a dense tensor in its order."""

    start: int
    size: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def places(tensors: Mapping[str, torch.Tensor]) -> dict[str, Place]:
    """Give each tensor its place, in their order, each in the order in memory that it has."""
    found, at = {}, 0
    for name, tensor in tensors.items():
        # Most are contiguous; to have torch work out what the others' order is takes longer.
        strides = (tensor if tensor.is_contiguous() else torch.empty_like(tensor, device="meta")).stride()
        size = tensor.numel() * tensor.element_size()
        found[name] = Place(at, size, tensor.dtype, tuple(tensor.shape), strides)
        at += math.ceil(size / _ALIGNED_TO) * _ALIGNED_TO
    return found


def size_of(where: Mapping[str, Place]) -> int:
    """Return how many bytes hold all of ``where``."""
    return max((place.start + place.size for place in where.values()), default=0)


def views(memory: torch.Tensor, where: Mapping[str, Place]) -> dict[str, torch.Tensor]:
    """Return the tensors of ``where`` as views of ``memory``, bytes of shape (``size_of(where)``,) or longer."""
    typed: dict[torch.dtype, torch.Tensor] = {}
    for place in where.values():
        if place.dtype not in typed:
            whole = len(memory) // place.dtype.itemsize * place.dtype.itemsize
            typed[place.dtype] = memory[:whole].view(place.dtype)
    found = {}
    for name, place in where.items():
        held = typed[place.dtype]
        start = held.storage_offset() + place.start // place.dtype.itemsize
        found[name] = held.as_strided(place.shape, place.strides, start)
    return found
