"""Streams: data sets that can only be read from the start, one item after another."""

from collections.abc import Iterator, Set
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset

from kway.data.order import Indices, check_batch_size
from kway.errors import UsageError


def is_stream(data: object) -> bool:
    """Whether ``data`` has ``__iter__`` and is no data set that gives samples by index.

    Raises ``UsageError`` for an iterator, which can be read only once, and a set, which has no order.
    """
    if isinstance(data, IterableDataset):
        return True
    if not hasattr(data, "__iter__") or (hasattr(data, "__getitem__") and hasattr(data, "__len__")):
        return False
    kind = type(data).__name__
    if isinstance(data, Set):
        raise UsageError(f"data of type {kind}", "its items have no order", "make a list of it")
    if isinstance(data, Iterator):
        raise UsageError(
            f"data that is an iterator ({kind})",
            "it can be read once, but every epoch and every device reads it from the start",
            "pass an IterableDataset, or an object whose __iter__ starts anew",
        )
    return True


@dataclass(frozen=True)
class StreamOrder:
    """The items of a stream as they come, cut into global batches: those of each epoch anew.

    ``samples``: how many items the stream says it has, or ``None``. It serves to show progress; where the stream
    ends is decided by the stream.
    """

    samples: int | None
    batch_size: int
    drop_last: bool = False

    def __post_init__(self) -> None:
        check_batch_size(self.batch_size)

    def steps(self, epoch: int) -> int | None:
        """Return the number of global batches by what the stream says of itself, or ``None``."""
        if self.samples is None:
            return None
        whole, rest = divmod(self.samples, self.batch_size)
        return whole + (rest > 0 and not self.drop_last)

    def batch(self, epoch: int, step: int) -> Indices:
        """Return the positions in the stream of a full batch, int64 of shape (batch_size,)."""
        start = step * self.batch_size
        return np.arange(start, start + self.batch_size, dtype=np.int64)

    def digest(self, epoch: int) -> None:
        """Return ``None``: what is compared are the items, batch by batch."""


def length(stream: Any) -> int | None:
    """Return the length that a stream says it has, or ``None``."""
    try:
        return len(stream)
    except (TypeError, NotImplementedError, AttributeError, ValueError):
        return None


def notices(stream: Any, order: StreamOrder, shuffle: bool, workers: int) -> list[str]:
    """Say what reading a stream means, in lines for the user."""
    name = type(stream).__name__
    found = [
        f"{name} is a stream: every rank reads all of it and keeps its share"
        + (", and its order is its own (not shuffled)" if shuffle else "")
    ]
    if workers > 1:
        found.append(f"{name} is a stream: one loader worker a rank reads it, not {workers}")
    if order.drop_last:
        found.append("drop_last of the DataLoader is kept: a last batch that is not full is left out")
    return found
