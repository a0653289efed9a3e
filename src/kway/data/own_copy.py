"""Copies of the user's data, for whoever looks at samples that a run has not come to yet."""

import copy
import gc
from collections.abc import Iterator
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from kway.data.arrays import in_memory
from kway.data.handles import stand_ins
from kway.errors import UsageError, line_of
from kway.units import bytes_text

_NEED = "what its samples take is found out over a copy, so that it gives a run what it would have given"
_INSTEAD = "go without a plan: name the strategy"
_NO_STATE = (str, bytes, int, float, bool, complex, type(None), type, FunctionType, BuiltinFunctionType)


def own_copy(data: Any, room: int | None = None) -> Any:
    """Return data whose samples can be asked for without ``data`` taking note: as it is now, a copy of all it holds.

    A data set may count how often it is asked, or draw, and a stream may be one that can be read once. Data in memory
    is read by indexing and nothing else, and is returned itself; files that are mapped into memory to be read, and
    modules, are shared, and what cannot be copied has its stand-in (``data/handles.py``). ``room``: bytes that a copy
    may take. What a data set reaches by a global name, or through the variables around a function, is not its own, and
    is no part of the copy.

    Raises ``UsageError`` for what cannot be copied, and for what takes more than ``room``.
    """
    source = data.dataset if isinstance(data, DataLoader) else data
    memo: dict[int, Any] = {}
    if _stays(source):
        if source is data:
            return data
        memo[id(source)] = source
    kind = type(source).__name__
    shared, size = _inside(data, set(memo))
    if room is not None and size > room:
        raise UsageError(
            f"data of type {kind} with {bytes_text(size)} in memory, where {bytes_text(room)} are left for a copy",
            _NEED,
            "pass its arrays as they are (a tuple of tensors or arrays), map a file into memory to be read, or "
            f"{_INSTEAD}",
        )
    memo |= {id(each): each for each in shared}
    if isinstance(data, DataLoader):
        # Its worker processes, where they stay, are nobody else's.
        memo[id(data.__dict__.get("_iterator"))] = None
    try:
        return copy.deepcopy(data, dict(memo))
    except Exception:
        # It holds something that is no data: seldom, so that nobody else need look for it.
        memo |= stand_ins(data, source, memo, by_index=_is_indexed(source))
    try:
        return copy.deepcopy(data, memo)
    except Exception as error:
        raise UsageError(
            f"data of type {kind} that cannot be copied ({line_of(error)})",
            _NEED,
            "make what cannot be copied where a sample is read, and not before; give its class a __deepcopy__ that "
            f"returns itself, if reading leaves no trace; or {_INSTEAD}",
        ) from error


class FromTheStart(IterableDataset[Any]):
    """A stream that can be read as often as wanted, whatever ``stream`` is: each pass reads a copy of it."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._epoch: int | None = None

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch the passes from now on are of."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        stream = own_copy(self._stream)
        if self._epoch is not None and hasattr(stream, "set_epoch"):
            stream.set_epoch(self._epoch)
        return iter(stream)


def _is_indexed(source: Any) -> bool:
    return hasattr(source, "__getitem__") and not isinstance(source, IterableDataset)


def _stays(source: Any) -> bool:
    """Whether to read samples changes nothing: what is in memory, and plain lists."""
    return type(source) is list or in_memory(source) is not None


def _inside(data: Any, known: set[int]) -> tuple[list[Any], int]:
    """Return what ``data`` reaches that a copy may share, and the bytes of the arrays that it may not.

    ``known``: ids of what is not looked into.
    """
    shared: list[Any] = []
    size = 0
    waiting, seen = [data], {*known}
    while waiting:
        value = waiting.pop()
        # By type: to be asked for its class, a value may raise (a weak reference to what is gone).
        kind = type(value)
        if issubclass(kind, _NO_STATE) or id(value) in seen:
            continue
        seen.add(id(value))
        if issubclass(kind, ModuleType) or (issubclass(kind, np.ndarray) and _read_only(value)):
            shared.append(value)
        elif issubclass(kind, torch.Tensor):
            storage = value.untyped_storage() if value.layout is torch.strided else None
            if storage is None or storage.data_ptr() not in seen:
                size += value.nbytes if storage is None else storage.nbytes()
            if storage is not None:
                seen.add(storage.data_ptr())
        elif issubclass(kind, np.ndarray) and not value.dtype.hasobject:
            size += value.nbytes
        else:
            waiting += gc.get_referents(value)
    return shared, size


def _read_only(value: Any) -> bool:
    """Whether an array lies in a file that is mapped to be read, and nobody can write to it."""
    while isinstance(value, np.ndarray) and not value.flags.writeable:
        if isinstance(value, np.memmap) and not isinstance(value.base, np.ndarray):
            return True
        value = value.base
    return False
