"""Which samples make a global batch: pure arithmetic of (seed, epoch, step), without memory or state."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import isqrt
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from kway.data.seeds import key
from kway.errors import UsageError

__all__ = ["Indices", "KeyedOrder", "Order", "bounds", "check_batch_size", "key", "permute", "split"]

Indices = npt.NDArray[np.int64]
Integers = TypeVar("Integers")  # an int64 array of numpy, or an int64 tensor of torch on any device

_ROUNDS = 8
_SMALLEST_SIDE = 16  # a domain of at least 256 points: fewer are not mixed well by a round function
_LOW_32 = 0xFFFFFFFF
_BLOCK = 8192  # positions: below it the time of a permutation is that of its hundred calls
_MULTIPLIER = 0x45D9F3B  # below 2^31, so that no product of it and 32 bits leaves int64


def permute(positions: Integers, n: int, seed: int) -> Integers:
    """Send ``positions`` (int64, from 0 to ``n`` - 1, any shape) to their places in a permutation of ``n``.

    A Feistel network over a grid of about sqrt(n) by sqrt(n) points, keyed by ``seed``. A point that lands
    outside ``n`` is sent on until it lands inside, which keeps the map one to one. Needs memory for the
    positions only, whatever ``n`` is. All products stay inside int64, so that arrays of numpy and tensors of
    torch, on any device, give the same numbers.
    """
    side = max(_SMALLEST_SIDE, isqrt(max(n - 1, 0)) + 1)
    other = max(_SMALLEST_SIDE, -(-n // side))
    round_keys = [key(seed, index) for index in range(_ROUNDS)]
    if n < _SMALLEST_SIDE**2:
        # Most of the grid is outside: sort the few points by where they land instead of sending them on.
        table = np.argsort(_feistel(np.arange(n, dtype=np.int64), side, other, round_keys))
        return _look_up(table, positions)  # type: ignore[no-any-return]
    placed = _feistel(positions, side, other, round_keys)
    outside = placed >= n
    while outside.any():
        placed[outside] = _feistel(placed[outside], side, other, round_keys)
        outside = placed >= n
    return placed  # type: ignore[no-any-return]


def _look_up(table: Indices, positions):  # type: ignore[no-untyped-def]
    """Return ``table[positions]`` as the kind of array that ``positions`` is."""
    if isinstance(positions, np.ndarray):
        return table[positions]
    return positions.new_tensor(table.tolist())[positions]


def _feistel(points, side: int, other: int, round_keys: list[int]):  # type: ignore[no-untyped-def]
    """Permute points from 0 to side * other - 1; addition modulo a side is what can be undone."""
    left, right = points // other, points % other
    for index, round_key in enumerate(round_keys):
        if index % 2:
            right = (right + _scramble(left, round_key)) % other
        else:
            left = (left + _scramble(right, round_key)) % side
    return left * other + right


def _scramble(half, round_key: int):  # type: ignore[no-untyped-def]
    """Return 32 bits that depend on all bits of ``half`` (below 2^31) and of ``round_key`` (63 bits)."""
    mixed = (half ^ (round_key & _LOW_32)) & _LOW_32
    mixed = ((mixed ^ (mixed >> 16)) * _MULTIPLIER) & _LOW_32
    mixed = ((mixed ^ (mixed >> 16)) * _MULTIPLIER + (round_key >> 32)) & _LOW_32
    mixed = ((mixed ^ (mixed >> 16)) * _MULTIPLIER) & _LOW_32
    return mixed ^ (mixed >> 16)


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

    def at(self, epoch: int, positions: Integers) -> Integers:
        """Return the data set indices at ``positions`` of an epoch, below ``samples``: int64, shape kept.

        Arrays of numpy, or tensors of torch, on whose device they are worked out.
        """
        return permute(positions, self.samples, key(self.seed, "order", epoch)) if self.shuffle else positions

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
