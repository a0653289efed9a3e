"""Whose the memory of a device is: the tensors that are there, by part, each piece of memory counted once."""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from types import GeneratorType
from typing import Any

import numpy as np
import torch

Tensor = torch.Tensor
# Objects of these are looked into: what they hold they hold for a step. Others are the user's, or only refer to things.
_LOOKED_INTO = ("kway.", "torch.utils.data.")


class Holdings:
    """Adds up the memory of ``device``, in bytes by part. What several parts name belongs to the first of them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.bytes: dict[str, int] = {}
        self._counted: set[int] = set()

    def add(self, part: str, *roots: Any) -> None:
        """Count for ``part`` all that can be reached from ``roots``, as ``walk`` goes, and was not counted yet."""
        self.bytes.setdefault(part, 0)
        for value in walk(roots):
            for address, size in self._pieces(value):
                if size and address not in self._counted:
                    self._counted.add(address)
                    self.bytes[part] += size

    @property
    def total(self) -> int:
        """All bytes that were counted."""
        return sum(self.bytes.values())

    def _pieces(self, value: Any) -> Iterator[tuple[int, int]]:
        """Yield (address, bytes) of the memory on the device in which a tensor or an array lies, views as a whole."""
        if isinstance(value, np.ndarray):
            if self.device.type == "cpu":
                whole = value
                while isinstance(whole.base, np.ndarray):
                    whole = whole.base
                # What is mapped from a file takes memory only as long as nobody else needs it.
                if not isinstance(whole, np.memmap):
                    yield whole.__array_interface__["data"][0], whole.nbytes
            return
        for tensor in dense_parts(value):
            if _same(tensor.device, self.device):
                # Classes of tensors without memory of their own have none to show.
                with suppress(RuntimeError, NotImplementedError):
                    storage = tensor.untyped_storage()
                    yield storage.data_ptr(), storage.nbytes()


def dense_parts(value: Any) -> list[Tensor]:
    """Return the dense tensors that a tensor is made of: itself, or the indices and values of a sparse one."""
    if not isinstance(value, Tensor):
        return []
    if value.layout is torch.sparse_coo:
        return [value._indices(), value._values()]
    # Other layouts are rare, and left out.
    return [value] if value.layout is torch.strided else []


def walk(roots: Iterable[Any]) -> Iterator[Any]:
    """Yield all that can be reached from ``roots``, each once: through containers, objects of kway, and generators.

    Modules and optimizers are not looked into.
    """
    waiting, seen = [*roots], dict[int, Any]()
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        # Held, so that nothing made later gets its identity.
        seen[id(value)] = value
        yield value
        waiting += _held(value)


def _held(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return [*value.values()]
    if isinstance(value, list | tuple | set | frozenset | deque):
        return [*value]
    if isinstance(value, GeneratorType):
        # What it has read ahead lies in its variables only.
        return [] if value.gi_frame is None else [*value.gi_frame.f_locals.values()]
    if type(value).__module__.startswith(_LOOKED_INTO) and not isinstance(value, torch.nn.Module):
        slots = [name for kind in type(value).__mro__ for name in vars(kind).get("__slots__", ())]
        return [*getattr(value, "__dict__", {}).values(), *(getattr(value, name, None) for name in slots)]
    return []


def _same(one: torch.device, other: torch.device) -> bool:
    return one.type == other.type and (one.type == "cpu" or (one.index or 0) == (other.index or 0))
