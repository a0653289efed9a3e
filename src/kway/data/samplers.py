"""A user's own sampler as an order: replayed with fixed seeds, so that every process sees the same."""

import copy
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from kway.data.digest import digest_of
from kway.data.generators import preserved, seed_generators
from kway.data.order import Indices, check_batch_size, key
from kway.errors import DataError, UsageError


@dataclass
class _Replay:
    """Runs a sampler epoch by epoch and keeps what the current epoch gave.

    An epoch is replayed under generators seeded by (seed, epoch). A sampler with a state of its own goes on
    from epoch to epoch; where an earlier epoch, or one further on, is asked for, it is run there from the
    start, on a copy, so that a resumed run sees what the uninterrupted run saw. The user's own object is
    left as it was. ``nested``: it gives batches, which may be iterators that can be read once.
    """

    sampler: Iterable[Any]
    data: object
    seed: int
    nested: bool = False
    epoch: int = -1
    items: list[Any] = field(default_factory=list)
    running: Any = None

    def at(self, epoch: int) -> list[Any]:
        """Return what the sampler gives in this epoch."""
        if epoch < self.epoch or self.running is None:
            self.epoch, self.running = -1, self._copy()
        while self.epoch < epoch:
            self.items = self._run(self.epoch + 1)
            self.epoch += 1
        return self.items

    def _copy(self) -> Any:
        # The data set may be large, and a sampler only looks at it: shared, not copied.
        return copy.deepcopy(self.sampler, {id(self.data): self.data})

    def _run(self, epoch: int) -> list[Any]:
        with preserved():
            parts: list[Any] = [self.running, getattr(self.running, "sampler", None)]
            for part in parts:
                if hasattr(part, "set_epoch"):
                    part.set_epoch(epoch)
                generator = getattr(part, "generator", None)
                if isinstance(generator, torch.Generator):
                    generator.manual_seed(key(self.seed, "sampler generator", epoch))
            seed_generators(key(self.seed, "sampler", epoch))
            return [list(batch) for batch in self.running] if self.nested else list(self.running)


@dataclass(frozen=True)
class SamplerOrder:
    """The indices that a sampler gives in each epoch, cut into global batches, the last one partial."""

    sampler: Iterable[int]
    samples: int
    batch_size: int
    seed: int
    data: object = None
    drop_last: bool = False
    _replay: _Replay = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_batch_size(self.batch_size)
        object.__setattr__(self, "_replay", _Replay(self.sampler, self.data, self.seed))

    def steps(self, epoch: int) -> int:
        """Return the number of global batches that the sampler's indices fill in this epoch."""
        whole, rest = divmod(len(self._replay.at(epoch)), self.batch_size)
        return whole + (rest > 0 and not self.drop_last)

    def batch(self, epoch: int, step: int) -> Indices:
        """Return the data set indices of one global batch. Raises ``DataError`` where one is out of range."""
        if not 0 <= step < self.steps(epoch):
            raise UsageError(f"step {step} of epoch {epoch}", f"it has {self.steps(epoch)} steps")
        items = self._replay.at(epoch)[step * self.batch_size : (step + 1) * self.batch_size]
        return _indices(items, self.samples, self.sampler)

    def digest(self, epoch: int) -> int:
        """Return a number that stands for all indices of this epoch in their order."""
        return digest_of(_plain(self._replay.at(epoch)))


@dataclass(frozen=True)
class BatchSamplerOrder:
    """The batches that a batch sampler gives in each epoch, each kept whole as one global batch."""

    sampler: Iterable[Iterable[int]]
    samples: int
    seed: int
    data: object = None
    _replay: _Replay = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_replay", _Replay(self.sampler, self.data, self.seed, nested=True))

    @property
    def batch_size(self) -> int:
        """The size that the batch sampler names, or else that of the largest batch of the current epoch."""
        named = getattr(self.sampler, "batch_size", None)
        if isinstance(named, int) and named > 0:
            return named
        return max((len(batch) for batch in self._replay.at(max(0, self._replay.epoch))), default=1)

    def steps(self, epoch: int) -> int:
        """Return the number of batches in this epoch."""
        return len(self._replay.at(epoch))

    def batch(self, epoch: int, step: int) -> Indices:
        """Return the data set indices of one batch. Raises ``DataError`` where one is out of range."""
        if not 0 <= step < self.steps(epoch):
            raise UsageError(f"step {step} of epoch {epoch}", f"it has {self.steps(epoch)} steps")
        return _indices(self._replay.at(epoch)[step], self.samples, self.sampler)

    def digest(self, epoch: int) -> int:
        """Return a number that stands for all batches of this epoch in their order."""
        return digest_of([_plain(batch) for batch in self._replay.at(epoch)])


def _plain(items: list[Any]) -> list[Any]:
    """Return indices of any kind as integers of Python, and other items as they are."""
    try:
        found = np.asarray(items)
    except ValueError:  # lists of several lengths, which ``batch`` will refuse
        return items
    return list(found.tolist()) if np.issubdtype(found.dtype, np.integer) else items


def _indices(items: list[Any], samples: int, sampler: object) -> Indices:
    """Return a sampler's items as indices; negative ones count from the end, as in Python."""
    name = type(sampler).__name__
    found = np.asarray(items)
    if not len(found) or found.ndim != 1 or not np.issubdtype(found.dtype, np.integer):
        raise DataError(f"a batch of {name}: {items[:4]}", "at least one index, all of them integers")
    if found.min() < -samples or found.max() >= samples:
        raise DataError(
            f"{name} gave indices from {found.min()} to {found.max()}", f"below {samples} samples"
        )
    return np.where(found < 0, found + samples, found).astype(np.int64)
