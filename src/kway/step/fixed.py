"""Inputs at fixed places: what a recorded step reads, filled anew with every share."""

from collections.abc import Hashable, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch

from kway.data.share import Share

Tensor = torch.Tensor


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
        micro = [(self._placed(batch, device), count) for batch, count in share.micro]
        self.share = replace(share, micro=micro)

    def fill(self, share: Share) -> None:
        """Write another share of the same form into the storage; nothing waits where it is pinned or there already."""
        values: list[Tensor] = []
        for batch, _ in share.micro:
            _collect(batch, values)
        near: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
        for place, value in zip(self._places, values, strict=True):
            if value.device == place.device and value.is_contiguous() and place.is_contiguous():
                places, sources = near.setdefault(place.dtype, ([], []))
                places.append(place)
                sources.append(value)
            else:
                place.copy_(value, non_blocking=True)
        for places, sources in near.values():
            torch._foreach_copy_(places, sources)

    def _placed(self, value: Any, device: torch.device) -> Any:
        if isinstance(value, Tensor):
            # Of a model's inputs the memory format is part: as ``to`` would have left it.
            place = torch.empty_like(value, device=device, pin_memory=False)
            self._places.append(place)
            return place
        return _mapped(value, lambda item: self._placed(item, device))


def _form(value: Any) -> Hashable:
    if isinstance(value, Tensor):
        if value.layout != torch.strided or value.requires_grad:
            raise UnsuitedError("a batch holds sparse tensors, or some that require gradients")
        return (tuple(value.shape), value.dtype, value.stride() if value.numel() else ())
    if isinstance(value, Mapping):
        return (type(value), tuple((key, _form(item)) for key, item in value.items()))
    if isinstance(value, tuple | list):
        return (type(value), tuple(_form(item) for item in value))
    if is_dataclass(value) and not isinstance(value, type):
        return (type(value), tuple(_form(getattr(value, field.name)) for field in fields(value)))
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return (type(value), value)
    raise UnsuitedError(f"a batch holds a {type(value).__name__}, of which no two can be compared")


def _collect(value: Any, found: list[Tensor]) -> None:
    """List the tensors of a batch, in the order in which ``_mapped`` meets them."""
    if isinstance(value, Tensor):
        found.append(value)
    elif isinstance(value, Mapping):
        for item in value.values():
            _collect(item, found)
    elif isinstance(value, tuple | list):
        for item in value:
            _collect(item, found)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            if field.init:
                _collect(getattr(value, field.name), found)


def _mapped(value: Any, function: Any) -> Any:
    if isinstance(value, Mapping):
        items = {key: function(item) for key, item in value.items()}
        try:
            return items if type(value) is dict else type(value)(items)  # type: ignore[call-arg]
        except TypeError:
            return items
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(function(item) for item in value))
    if isinstance(value, tuple | list):
        return type(value)(function(item) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: function(getattr(value, f.name)) for f in fields(value) if f.init})
    return value
