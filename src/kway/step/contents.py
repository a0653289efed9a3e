"""What lies in the containers and plain objects of a model, and of functions around it: a look between two steps.

A recorded step holds numbers of the host as they were. Whoever changes one where it lies, as in
``model.scales["aux"] = 0.1``, leaves every attribute the same object.
"""

import sys
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from functools import partial
from operator import is_
from types import CellType, FunctionType, MethodType, SimpleNamespace
from typing import Any

import torch
from torch import nn

# How deep it is looked; entries of one container, of a larger one their number alone; and entries of all together.
_DEPTH, _MOST_OF_ONE, _MOST = 4, 256, 4096
_PLAIN = (bool, int, float, complex, str, bytes)
# What torch and Python keep of their own accord changes without a meaning, as the cache of a logger.
_NOT_THE_USERS = sys.stdlib_module_names | {"torch", "kway"}


class Contents:
    """Which objects and numbers lie in what ``roots`` hold, a few levels deep, but for modules among ``known``.

    What a function closes over counts. Tensors count as objects: work that was recorded reads their numbers itself.
    """

    def __init__(self, roots: Iterable[Any], known: Iterable[nn.Module] = ()) -> None:
        # Held, so that no other object can take the place of one.
        self._full: list[tuple[Any, tuple[Any, ...]]] = []
        self._sizes: list[tuple[Any, int]] = []
        # Most are torch's own, of hooks.
        self._empty: list[Any] = []
        seen = {id(module) for module in known}
        waiting = deque((value, _DEPTH) for value in roots)
        left = _MOST
        while waiting and left > 0:
            value, depth = waiting.popleft()
            for holder in () if id(value) in seen else _holders(value):
                seen |= {id(value), id(holder)}
                if not isinstance(holder, CellType) and len(holder) > _MOST_OF_ONE:
                    self._sizes.append((holder, len(holder)))
                    continue
                inside = _entries(holder)
                left -= len(inside)
                if not inside and not isinstance(holder, CellType):
                    self._empty.append(holder)
                elif not isinstance(holder, tuple):
                    self._full.append((holder, inside))
                if depth > 1:
                    waiting += ((entry, depth - 1) for entry in inside)

    def unchanged(self) -> bool:
        """Whether the same lies there."""
        return (
            not any(self._empty)
            and all(len(holder) == size for holder, size in self._sizes)
            and all(same(_entries(holder), known) for holder, known in self._full)
        )


def same(now: Collection[Any], known: Collection[Any]) -> bool:
    """Whether these are the same objects in the same order, or numbers and texts that say the same."""
    return len(now) == len(known) and (all(map(is_, now, known)) or all(map(_alike, now, known)))


def _alike(one: Any, other: Any) -> bool:
    # By its text, of which a NaN is equal to itself.
    return one is other or (type(one) is type(other) and isinstance(one, _PLAIN) and repr(one) == repr(other))


def _holders(value: Any) -> Iterator[Any]:
    """Yield what of ``value`` holds objects, and may hold others later while it stays the same itself."""
    if isinstance(value, list | dict | set | tuple):
        yield value
    elif isinstance(value, FunctionType):
        yield from value.__closure__ or ()
    elif isinstance(value, MethodType):
        yield from _holders(value.__self__)
    elif isinstance(value, partial):
        yield from (value.args, value.keywords, *_holders(value.func))
    elif isinstance(value, SimpleNamespace) or not (
        isinstance(value, torch.Tensor | type) or type(value).__module__.partition(".")[0] in _NOT_THE_USERS
    ):
        inside = getattr(value, "__dict__", None)
        if isinstance(inside, dict):
            yield inside


def _entries(holder: Any) -> tuple[Any, ...]:
    """Return what a holder holds; of a dict the keys as well."""
    if isinstance(holder, dict):
        return (*holder, *holder.values())
    if isinstance(holder, CellType):
        try:
            return (holder.cell_contents,)
        except ValueError:
            return ()
    return tuple(holder)
