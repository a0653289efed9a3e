"""Which samples make a global batch: pure arithmetic of (seed, epoch, step), without memory or state."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from kway.data.permutation import Indices, permute
from kway.data.seeds import key
from kway.errors import UsageError

__all__ = ["Indices", "KeyedOrder", "Order", "bounds", "check_batch_size", "key", "permute", "split"]

_BLOCK = 8192  # positions: below it the time of a permutation is that of its hundred calls


def split(total: int, parts: int) -> list[int]:
    """Cut ``total`` samples into ``parts`` sizes that differ by at most 1, the larger ones first."""
    if parts < 1 or total < 0:
        raise UsageError(f"{total} samples in {parts} parts", "samples from 0, parts from 1")
    size, larger = divmod(total, parts)
    return [size + 1] * larger + [size] * (parts - larger)


def bounds(total: int, parts: int, part: int) -> tuple[int, int]:
    """Return where part number ``part`` of ``split(total, parts)`` starts and stops."""
    if not 0 <= part < parts:
        raise UsageError(f"part {part} of {parts}", f"a part from 0 to {parts - 1}")
    size, larger = divmod(total, parts)
    start = part * size + min(part, larger)
    return start, start + size + (part < larger)


def check_batch_size(batch_size: object) -> int:
    """Return the batch size as a plain integer. Raises ``UsageError`` where it is none, or below 1."""
    if isinstance(batch_size, bool) or not isinstance(batch_size, int | np.integer):
        raise UsageError(
            f"batch size {batch_size!r}", "a whole number of samples, at least 1", "give one, like 256"
        )
    if batch_size < 1:
        raise UsageError(f"batch size {batch_size}", "at least 1 sample", "give a number like 256")
    return int(batch_size)


class Order(Protocol):
    """The order of the samples: the same in every process, whatever the number of devices or workers."""

    @property
    def samples(self) -> int | None:
        """The number of samples in the data set; ``None`` where only its end will tell."""

    @property
    def batch_size(self) -> int:
        """The number of samples in a full global batch."""

    def steps(self, epoch: int) -> int | None:
        """Return the number of global batches in this epoch; ``None`` where only its end will tell."""

    def batch(self, epoch: int, step: int) -> Indices:
        """Return the data set indices of one global batch, int64 of shape (samples in it,)."""

    def digest(self, epoch: int) -> int | None:
        """Return a number that stands for the order of this epoch, to be compared between ranks.

        ``None`` where there is nothing to compare: the order is arithmetic, and equal by itself.
        """


def _positions(start: int, stop: int) -> Indices:
    return np.arange(start, stop, dtype=np.int64)


@dataclass(frozen=True)
class KeyedOrder:
    """All samples once an epoch, shuffled by (seed, epoch) or in the order of the data set.

    The last batch is partial where ``batch_size`` does not divide ``samples``: it is left out only where
    ``drop_last`` asks for it. Any step of any epoch is found at once, without the steps before it.
    """

    samples: int
    batch_size: int
    seed: int
    shuffle: bool = True
    drop_last: bool = False

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise UsageError(f"{self.samples} samples", "at least 1")
        check_batch_size(self.batch_size)

    def steps(self, epoch: int) -> int:
        """Return the number of global batches, the partial one included: the same in every epoch."""
        whole, rest = divmod(self.samples, self.batch_size)
        return whole + (rest > 0 and not self.drop_last)

    def batch(self, epoch: int, step: int) -> Indices:
        """Return the data set indices of batch ``step``. Raises ``UsageError`` past the end of the epoch."""
        if not 0 <= step < self.steps(epoch):
            raise UsageError(f"step {step} of epoch {epoch}", f"it has {self.steps(epoch)} steps")
        start = step * self.batch_size
        return self.at(epoch, _positions(start, min(start + self.batch_size, self.samples)))

    def at(self, epoch: int, positions: Indices) -> Indices:
        """Return the data set indices at ``positions`` of an epoch, below ``samples``: int64, shape kept."""
        return permute(positions, self.samples, self.seed_of(epoch)) if self.shuffle else positions

    def seed_of(self, epoch: int) -> int:
        """Return the key of the permutation of an epoch."""
        return key(self.seed, "order", epoch)

    def batches(self, epoch: int, start: int = 0) -> Iterator[Indices]:
        """Yield ``batch(epoch, step)`` from step ``start`` on, many worked out at a time: far less time each."""
        at_once = max(1, _BLOCK // self.batch_size)
        steps = self.steps(epoch)
        for block in range(start, steps, at_once):
            first, stop = block * self.batch_size, min(block + at_once, steps) * self.batch_size
            found = self.at(epoch, _positions(first, min(stop, self.samples)))
            yield from (found[at : at + self.batch_size] for at in range(0, len(found), self.batch_size))

    def digest(self, epoch: int) -> None:
        """Return ``None``: the order is arithmetic."""
