"""Rows of arrays on a device: what they take there, how they get there, how they are taken."""

from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np
import torch

from kway.data.arrays import Rows, leaves
from kway.data.order import Indices, KeyedOrder

Tensor = torch.Tensor
_CHUNK_BYTES = 64 << 20  # what is copied at a time, so that no second copy of the data lies on the host
_TYPES = {
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.complex64, torch.complex128,
}  # fmt: skip


def bytes_needed(rows: Rows, order: KeyedOrder, device: torch.device) -> int | None:
    """Return the bytes that rows and the order of an epoch take on ``device``, beside what lies there already.

    ``None`` where an array cannot be kept there: a sparse tensor, a subclass of tensors, a rare element type.
    """
    total = order.samples * torch.int64.itemsize
    for leaf in leaves(rows.arrays):
        dtype = _type_of(leaf)
        if dtype is None:
            return None
        if not _lies_there(leaf, rows.chosen, device):
            count = len(leaf) if rows.chosen is None else len(rows.chosen)
            total += count * prod(leaf.shape[1:]) * dtype.itemsize
    return total


def _type_of(leaf: Any) -> torch.dtype | None:
    if isinstance(leaf, np.ndarray):
        found = torch.from_numpy(np.empty(0, dtype=leaf.dtype)).dtype
    elif type(leaf) is Tensor and leaf.layout is torch.strided and not leaf.is_quantized:
        found = leaf.dtype
    else:
        return None
    return found if found in _TYPES else None


def _lies_there(leaf: Any, chosen: Indices | None, device: torch.device) -> bool:
    return chosen is None and isinstance(leaf, Tensor) and leaf.device == device


def versions(rows: Rows) -> list[int]:
    """Return numbers that change where a tensor is changed in place. Arrays of numpy have none."""
    found = [leaf for leaf in leaves(rows.arrays) if isinstance(leaf, Tensor) and not leaf.is_inference()]
    return [leaf._version for leaf in found]


def reader(leaf: Tensor) -> Callable[[Tensor], Tensor]:
    """Return what takes rows (int64 tensor, shape (n,)) of ``leaf``, in the memory format of the host."""
    # Indexing keeps another memory format, as it does on the host; index_select, the faster one, does not.
    usual = leaf.stride() == torch.empty(leaf.shape, device="meta").stride()
    return (lambda rows: leaf.index_select(0, rows)) if usual else (lambda rows: leaf[rows])


def copied(leaf: Any, chosen: Indices | None, device: torch.device) -> Tensor:
    """Copy the ``chosen`` rows of an array to ``device``, piece by piece, in the memory format that each row has."""
    if _lies_there(leaf, chosen, device):
        return leaf  # type: ignore[no-any-return]
    count = len(leaf) if chosen is None else len(chosen)
    dtype = _type_of(leaf)
    assert dtype is not None
    shape = (count, *leaf.shape[1:])
    if isinstance(leaf, Tensor):
        # What torch makes of a row of these strides, without the memory.
        strides = torch.empty_like(leaf[:1], device="meta").stride()[1:]
        found = torch.empty_strided(shape, (prod(shape[1:]), *strides), dtype=dtype, device=device)
    else:
        found = torch.empty(shape, dtype=dtype, device=device)
    at_once = max(1, _CHUNK_BYTES // max(1, prod(shape[1:]) * dtype.itemsize))
    for start in range(0, count, at_once):
        which = slice(start, start + at_once) if chosen is None else chosen[start : start + at_once]
        if isinstance(leaf, Tensor):
            rows = leaf[which] if chosen is None else leaf[torch.from_numpy(which).to(leaf.device)]
        else:
            rows = torch.from_numpy(np.array(leaf[which]))
        found[start : start + at_once].copy_(rows)
    return found
