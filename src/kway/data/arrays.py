"""Data that lies in memory: read a whole batch at once by indexing, without a loop over samples."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, Subset, TensorDataset

from kway.data.order import Indices
from kway.errors import DataError


@dataclass(frozen=True)
class Rows:
    """What a data set in memory reads its batches from, so that it can be kept elsewhere.

    ``arrays``: tensors and arrays of one row a sample, alone or in a structure. ``made`` turns rows of them, on
    whichever device they lie, into the batch. ``chosen``: which rows are the samples, int64, below the number of
    rows; ``None``: all of them.
    """

    arrays: Any
    made: Callable[[Any], Any]
    chosen: Indices | None = None


class InMemory(Dataset[Any], ABC):
    """A data set that gives many samples at once. Reading it draws no random numbers.

    ``name``: of a named data set, that of its source, which stands in errors and records.
    """

    name = ""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def take(self, indices: Indices) -> Any:
        """Return the batch of these samples, in this order: tensors whose first size is ``len(indices)``."""

    def rows(self) -> Rows | None:
        """Return what ``take`` reads from; ``None`` where it is not just rows of arrays."""
        return None

    def __getitem__(self, index: int) -> Any:
        """Return one sample: the batch of it alone, without the first dimension."""
        return each(self.take(np.array([index], dtype=np.int64)), lambda leaf: leaf[0])


class Arrays(InMemory):
    """Tensors and arrays of equal length: alone, or in nested tuples, lists (read as tuples) and dicts."""

    def __init__(self, structure: Any) -> None:
        self.structure = each(structure, _checked)
        lengths = [len(leaf) for leaf in leaves(self.structure)]
        if len(set(lengths)) > 1:
            raise DataError(f"arrays of lengths {lengths}", "one length, the number of samples")
        self._length = lengths[0]

    def __len__(self) -> int:
        return self._length

    def rows(self) -> Rows:
        """Return the structure itself: its rows are the batch."""
        return Rows(self.structure, as_they_are)

    def take(self, indices: Indices) -> Any:
        """Return the structure with the rows ``indices`` of every tensor, shape (len(indices), ...)."""
        rows = torch.from_numpy(indices)
        return each(
            self.structure,
            lambda leaf: (
                leaf[rows.to(leaf.device)]
                if isinstance(leaf, torch.Tensor)
                # By numpy: memory-mapped, read-only or strided arrays need no copy of the whole.
                else torch.from_numpy(np.ascontiguousarray(leaf[indices]))
            ),
        )


class Selection(InMemory):
    """Some samples of another data set in memory: what ``torch.utils.data.Subset`` is, read at once."""

    def __init__(self, base: InMemory, chosen: Indices) -> None:
        if len(chosen) and not (-len(base) <= chosen.min() and chosen.max() < len(base)):
            raise DataError(
                f"a subset with indices from {chosen.min()} to {chosen.max()}", f"below {len(base)} samples"
            )
        self.base, self.chosen = base, chosen

    def __len__(self) -> int:
        return len(self.chosen)

    def take(self, indices: Indices) -> Any:
        """Return the batch of these positions of the selection."""
        return self.base.take(self.chosen[indices])

    def rows(self) -> Rows | None:
        """Return the rows of the other data set, of which some are chosen."""
        base = self.base.rows()
        if base is None:
            return None
        chosen = np.where(self.chosen < 0, self.chosen + len(self.base), self.chosen)
        return replace(base, chosen=chosen if base.chosen is None else base.chosen[chosen])


def as_they_are(rows: Any) -> Any:
    """Return rows that are a batch already."""
    return rows


def in_memory(data: object) -> InMemory | None:
    """Return ``data`` as a data set in memory, or ``None`` where its samples must be asked for one by one.

    Only exact types are taken: a subclass of ``TensorDataset`` may do anything when a sample is asked for.
    Raises ``DataError`` where lengths differ or an element type is none that torch has.
    """
    if isinstance(data, InMemory):
        return data
    if type(data) is TensorDataset:
        return Arrays(data.tensors)
    if type(data) is Subset:
        base = in_memory(data.dataset)
        return None if base is None else Selection(base, np.asarray(data.indices, dtype=np.int64).reshape(-1))
    return Arrays(data) if _is_structure(data) else None


def _is_structure(data: object) -> bool:
    if isinstance(data, list):  # a list of tuples or dicts is a data set of samples, whatever they hold
        return len(data) > 0 and all(isinstance(item, torch.Tensor | np.ndarray) for item in data)
    if isinstance(data, tuple):
        return len(data) > 0 and all(_is_structure(item) for item in data)
    if isinstance(data, dict):
        return len(data) > 0 and all(_is_structure(item) for item in data.values())
    return isinstance(data, torch.Tensor | np.ndarray)


def each(structure: Any, function: Any) -> Any:
    """Apply ``function`` to every array of a structure, and keep the structure (lists become tuples)."""
    if isinstance(structure, dict):
        return {name: each(item, function) for name, item in structure.items()}
    if isinstance(structure, tuple) and hasattr(structure, "_fields"):
        return type(structure)(*(each(item, function) for item in structure))
    if isinstance(structure, tuple | list):
        return tuple(each(item, function) for item in structure)
    return function(structure)


def leaves(structure: Any) -> list[Any]:
    """List the arrays of a structure, in order."""
    found: list[Any] = []
    each(structure, found.append)
    return found


def _checked(leaf: Any) -> Any:
    """Return an array that can be indexed by sample and becomes a tensor. Raises ``DataError`` otherwise."""
    if leaf.ndim == 0:
        raise DataError("an array without dimensions", "one row a sample: shape (samples, ...)")
    if isinstance(leaf, torch.Tensor):
        return leaf.detach()
    if not leaf.dtype.isnative:
        leaf = leaf.astype(leaf.dtype.newbyteorder("="))
    try:
        torch.from_numpy(np.zeros(1, dtype=leaf.dtype))
    except TypeError:
        raise DataError(f"an array of type {leaf.dtype}", "numbers or booleans that torch has") from None
    return leaf
