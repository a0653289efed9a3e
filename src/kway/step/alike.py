"""Whether what lies somewhere now says the same as what lay there, at another look.

Nothing of the user's runs: see ``kway.step.holders``.
"""

from collections.abc import Collection
from functools import partial
from operator import is_
from types import MethodType
from typing import Any

import numpy as np
import torch

from kway.step.holders import holding

# How deep it is looked; entries of one container, of a larger one their number alone; and entries of all together.
DEPTH, MOST_OF_ONE, MOST = 4, 256, 4096
PLAIN = (bool, int, float, complex, str, bytes, type(None))


def same(now: Collection[Any], known: Collection[Any]) -> bool:
    """Whether these are the same objects in the same order, or say the same: see ``alike``."""
    return len(now) == len(known) and (
        all(map(is_, now, known)) or _all_alike(now, known, DEPTH + 1, _Left(MOST))
    )


def alike(one: Any, other: Any) -> bool:
    """Whether these are one object, or plain values, or containers of such, that say the same.

    Of containers with more entries than are looked at, all together, that is not known: they are not alike.
    """
    return _alike(one, other, DEPTH, _Left(MOST))


class _Left:
    """How many entries are still looked at: containers may lie in each other many times over."""

    def __init__(self, entries: int) -> None:
        self._entries = entries

    def takes(self, entries: int) -> bool:
        """Whether there is room for so many more."""
        self._entries -= entries
        return self._entries >= 0


def _alike(one: Any, other: Any, depth: int, left: _Left) -> bool:
    kind = type(one)
    if one is other or kind is not type(other):
        return one is other
    # Those that hold nothing beside their entries, as shapes do.
    if issubclass(kind, (tuple, list, dict)) and not kind.__dictoffset__:
        holder, pair = holding(one), holding(other)
        return (
            holder.size == pair.size <= MOST_OF_ONE
            and left.takes(holder.size)
            and _all_alike(holder.read(one), pair.read(other), depth, left)
        )
    for text in (float, complex):
        if issubclass(kind, text):
            # Of which a NaN is equal to itself, and a zero not to that of the other sign.
            return text.__repr__(one) == text.__repr__(other)
    for plain in (int, str, bytes):
        if issubclass(kind, plain):
            return plain.__eq__(one, other) is True
    if issubclass(kind, np.generic):
        return bool(one.dtype == other.dtype and one.tobytes() == other.tobytes())
    if kind is MethodType:
        return one.__func__ is other.__func__ and one.__self__ is other.__self__
    if kind is partial:
        parts, others = ((p.func, p.args, p.keywords) for p in (one, other))
        return _all_alike(parts, others, depth, left)
    if kind is slice:
        parts, others = ((s.start, s.stop, s.step) for s in (one, other))
        return _all_alike(parts, others, depth, left)
    if kind in (set, frozenset):
        return len(one) == len(other) <= MOST_OF_ONE and left.takes(len(one)) and _equal_sets(one, other)
    return kind in (range, torch.device) and bool(one == other)


def _all_alike(one: Collection[Any], other: Collection[Any], depth: int, left: _Left) -> bool:
    return depth > 0 and all(_alike(a, b, depth - 1, left) for a, b in zip(one, other, strict=True))


def _equal_sets(one: Collection[Any], other: Collection[Any]) -> bool:
    # Whether others are equal is for them to say.
    return all(type(entry) in PLAIN for entry in (*one, *other)) and one == other
