"""A keyed permutation of n positions: any place of it is found by arithmetic, without the others and without memory."""

from dataclasses import dataclass
from math import isqrt

import numpy as np
import numpy.typing as npt

from kway.data.seeds import key

Indices = npt.NDArray[np.int64]
Tables = list[Indices]

_ROUNDS = 8
_SMALLEST_SIDE = 16  # a domain of at least 256 points: fewer are not mixed well by a round function
_LOW_32 = 0xFFFFFFFF
_MULTIPLIER = 0x45D9F3B  # below 2^31, so that no product of it and 32 bits leaves int64


@dataclass(frozen=True)
class Network:
    """A Feistel network over the points of a grid, 0 to ``side * other`` - 1: each half is moved by the other in turns.

    The grid holds ``n`` points and less than a side more; of few, 256 of them.
    """

    n: int
    side: int
    other: int
    keys: tuple[int, ...]

    @classmethod
    def of(cls, n: int, seed: int) -> "Network":
        """Return the network of ``n`` positions: a grid of about sqrt(n) by sqrt(n)."""
        side = max(_SMALLEST_SIDE, isqrt(max(n - 1, 0)) + 1)
        return cls(
            n, side, max(_SMALLEST_SIDE, -(-n // side)), tuple(key(seed, index) for index in range(_ROUNDS))
        )

    @property
    def is_sparse(self) -> bool:
        """Whether most of the grid is outside of the ``n`` positions."""
        return self.n < _SMALLEST_SIDE**2

    def forward(self, points: Indices, tables: Tables | None = None) -> Indices:
        """Return where points of the grid land on it: int64, shape kept. ``tables``: for many, those of the network."""
        left, right = points // self.other, points % self.other
        for index, round_key in enumerate(self.keys):
            half = left if index % 2 else right
            added = _scramble(half, round_key) if tables is None else tables[index][half]
            if index % 2:
                right = (right + added) % self.other
            else:
                left = (left + added) % self.side
        return left * self.other + right

    def back(self, points: Indices, tables: Tables) -> Indices:
        """Return which points land on these."""
        left, right = points // self.other, points % self.other
        for index in reversed(range(len(tables))):
            if index % 2:
                right = (right - tables[index][left]) % self.other
            else:
                left = (left - tables[index][right]) % self.side
        return left * self.other + right

    def inside(self, points: Indices, tables: Tables | None = None) -> Indices:
        """Return where points on the grid end that are sent on until they are below ``n``: still one to one."""
        found = points.copy()
        outside = found >= self.n
        while outside.any():
            found[outside] = self.forward(found[outside], tables)
            outside = found >= self.n
        return found

    def tables(self) -> Tables:
        """Return what each round adds to a half, by what the other half is; below the half's side."""
        sizes = (self.side, self.other)
        return [
            _scramble(np.arange(sizes[1 - index % 2], dtype=np.int64), round_key) % sizes[index % 2]
            for index, round_key in enumerate(self.keys)
        ]

    def detours(self, tables: Tables) -> tuple[Indices, Indices]:
        """Return the positions that first land outside, and where they end: less than a side of them."""
        outside = np.arange(self.n, self.side * self.other, dtype=np.int64)
        positions = self.back(outside, tables)
        here = positions < self.n
        return positions[here], self.inside(outside[here], tables)


def permute(positions: Indices, n: int, seed: int) -> Indices:
    """Send ``positions`` (int64, from 0 to ``n`` - 1, any shape) to their places in a permutation of ``n``.

    Keyed by ``seed``; needs memory for the positions only, whatever ``n`` is. All products stay inside int64.
    """
    network = Network.of(n, seed)
    if network.is_sparse:
        # Sort the few points by where they land instead of sending them on.
        return np.argsort(network.forward(np.arange(n, dtype=np.int64)))[positions]
    return network.inside(network.forward(positions))


def _scramble(half: Indices, round_key: int) -> Indices:
    """Return 32 bits that depend on all bits of ``half`` (below 2^31) and of ``round_key`` (63 bits)."""
    mixed = (half ^ (round_key & _LOW_32)) & _LOW_32
    mixed = ((mixed ^ (mixed >> 16)) * _MULTIPLIER) & _LOW_32
    mixed = ((mixed ^ (mixed >> 16)) * _MULTIPLIER + (round_key >> 32)) & _LOW_32
    mixed = ((mixed ^ (mixed >> 16)) * _MULTIPLIER) & _LOW_32
    return mixed ^ (mixed >> 16)
