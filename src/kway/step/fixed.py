"""Inputs at fixed places: what a recorded step reads, filled anew with every share."""

from collections.abc import Hashable, Mapping
from dataclasses import is_dataclass, replace
from typing import Any

import torch

from kway.data.share import Share
from kway.data.structure import attributes_of, mapped

Tensor = torch.Tensor
# Entries up to which tensors are copied together: that saves launches, but spreads each one over few multiprocessors.
_SMALL = 4096


class UnsuitedError(Exception):
    """Why something cannot be recorded, in words for the user."""


def form_of(share: Share) -> Hashable:
    """Return what must be equal for two shares to be computed by the same work: structure, shapes, dtypes, counts.

    Values that are no tensors are part of it. Raises ``UnsuitedError`` for values that cannot be compared, and for
    tensors that cannot be written to.
    """
    return (share.count, share.total, tuple((_form(batch), count) for batch, count in share.micro))


class FixedInputs:
    """Storage on ``device`` for shares of one form. ``share`` is what the recorded work computes."""

    def __init__(self, share: Share, device: torch.device) -> None:
        self._places: list[Tensor] = []

        def placed(value: Tensor) -> Tensor:
            # Of a model's inputs the memory format is part: as ``to`` would have left it.
            self._places.append(torch.empty_like(value, device=device, pin_memory=False))
            return self._places[-1]

        self.share = replace(share, micro=[(mapped(batch, placed), count) for batch, count in share.micro])

    def fill(self, share: Share) -> None:
        """Write another share of the same form into the storage; nothing waits where it is pinned or there already."""
        values: list[Tensor] = []
        for batch, _ in share.micro:
            mapped(batch, lambda value: _noted(value, values))
        near: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
        for place, value in zip(self._places, values, strict=True):
            small = value.numel() <= _SMALL and value.is_contiguous() and place.is_contiguous()
            if small and value.device == place.device:
                places, sources = near.setdefault(place.dtype, ([], []))
                places.append(place)
                sources.append(value)
            else:
                place.copy_(value, non_blocking=True)
        for places, sources in near.values():
            if len(places) == 1:
                places[0].copy_(sources[0], non_blocking=True)
            else:
                torch._foreach_copy_(places, sources)


def _form(value: Any, seen: dict[int, tuple[int, Any]] | None = None) -> Hashable:
    """``seen``: dataclasses that were, by ``id``, held, and as which they were: they may refer to each other."""
    seen = {} if seen is None else seen
    if isinstance(value, Tensor):
        if value.layout != torch.strided or value.requires_grad:
            raise UnsuitedError("a batch holds sparse tensors, or some that require gradients")
        return (tuple(value.shape), value.dtype, value.stride() if value.numel() else ())
    if isinstance(value, Mapping):
        return (type(value), tuple((key, _form(item, seen)) for key, item in value.items()))
    if isinstance(value, tuple | list):
        return (type(value), tuple(_form(item, seen) for item in value))
    if is_dataclass(value) and not isinstance(value, type):
        if id(value) in seen:
            return ("again", seen[id(value)][0])
        seen[id(value)] = len(seen), value
        return (type(value), tuple((name, _form(part, seen)) for name, part in attributes_of(value).items()))
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return (type(value), value)
    raise UnsuitedError(f"a batch holds a {type(value).__name__}, of which no two can be compared")


def _noted(value: Tensor, found: list[Tensor]) -> Tensor:
    found.append(value)
    return value
