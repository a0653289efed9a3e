"""Functions for each replica of a process: ``copy.deepcopy`` leaves functions, and all that they close over, shared.

A hook keeps what a layer returned in a dict that it closes over, and forward asks another function for it: a replica
must find its own there, whatever the others do meanwhile.
"""

import copy
import random
import sys
from collections import deque
from collections.abc import Iterable
from functools import partial
from types import BuiltinFunctionType, CellType, FunctionType, MethodType
from typing import Any
from weakref import ReferenceType, ref

import numpy as np
import torch

from kway.jobs.replica_contents import ATOMS, CONTAINERS, entries, table_of

# What a function has beside its code, defaults and attributes; annotations are computed when asked for where they can.
_TOLD = (
    "__module__",
    "__qualname__",
    "__doc__",
    "__annotate__" if sys.version_info >= (3, 14) else "__annotations__",
)


def of_process() -> dict[int, Any]:
    """Return a memo for ``copy.deepcopy``, by id, of the generators that a process has for all code."""
    drawn: list[Any] = [random.random, np.random.random]
    return {id(each): each for each in (*(call.__self__ for call in drawn), torch.default_generator)}


def with_own_functions(made: tuple[Any, ...], memo: dict[int, Any]) -> tuple[Any, ...]:
    """Return ``made``, which ``copy.deepcopy`` did with ``memo``, with functions of its own in place of shared ones.

    A function is made again where it closes over variables, or has defaults that can change. Variables, and what they
    hold, are copied through ``memo``: once, for all functions and attributes that know them, and what of it is a part
    of the model is that of the copy. What cannot be copied (a lock, a file) stays shared, and so does what functions
    reach by global names, or through their class. Weak references to what was copied lead to the copy.
    """
    own = _Own(memo)
    made = tuple(map(own.of, made))
    done: set[int] = set()
    while waiting := [key for key in memo if key not in done]:
        done.update(waiting)
        for key in waiting:
            # Under its own id lies what is shared, or was copied before; under the memo's, what deepcopy keeps alive.
            if key not in (id(memo), id(memo[key])):
                own.refill(memo[key])
    return made


class _Own:
    """What is to stand in copies in place of a value that ``copy.deepcopy`` has left as it is."""

    def __init__(self, memo: dict[int, Any]) -> None:
        self._memo = memo
        self._settle()

    def refill(self, made: Any) -> None:
        """Replace what ``made``, a copy, holds itself."""
        if isinstance(made, partial):
            # Its function and arguments cannot be written to one by one.
            again: Any = made
            again.__setstate__((self.of(made.func), self.of(made.args), made.keywords, vars(made)))
            self._replace(dict, made.keywords, [*made.keywords.items()])
        elif isinstance(made, set):
            now = [self.of(value) for value in made]
            made.clear()
            made.update(now)
        elif isinstance(made, list | deque):
            self._replace(list if isinstance(made, list) else deque, made, [*enumerate(made)])
        elif isinstance(made, dict):
            self._replace(dict, made, [*made.items()])
        held = table_of(made)
        self._replace(dict, held, [*held.items()])

    def _replace(self, kind: Any, made: Any, items: Iterable[tuple[Any, Any]]) -> None:
        for place, value in items:
            now = self.of(value)
            if now is not value:
                # Of a class of the user's, which may refuse to be written to.
                kind.__setitem__(made, place, now)

    def of(self, value: Any) -> Any:
        """Return what stands for ``value``, which a copy holds."""
        kind = type(value)
        if kind is FunctionType:
            return self._function(value)
        if kind is MethodType:
            function, holder = self.of(value.__func__), self._content(value.__self__)
            same = function is value.__func__ and holder is value.__self__
            return value if same else MethodType(function, holder)
        if kind is BuiltinFunctionType and isinstance(value.__self__, CONTAINERS):
            holder = self._content(value.__self__)
            return value if holder is value.__self__ else getattr(holder, value.__name__)
        if kind is ReferenceType:
            target = value()
            now = self._memo.get(id(target), target)
            return value if now is target else ref(now)
        if issubclass(kind, tuple):
            items = [self.of(item) for item in value]
            same = all(now is item for now, item in zip(items, value, strict=True))
            return value if same else tuple.__new__(kind, items)
        return value

    def _function(self, own: FunctionType) -> FunctionType:
        if id(own) in self._memo:
            return self._memo[id(own)]  # type: ignore[no-any-return]
        cells = own.__closure__ or ()
        if not cells and not own.__defaults__ and not own.__kwdefaults__:
            return own
        # Ids are of what lives.
        self._memo.setdefault(id(self._memo), []).append(own)
        now = [self._memo.setdefault(id(cell), CellType()) for cell in cells]
        made = FunctionType(own.__code__, own.__globals__, own.__name__, None, tuple(now))
        # Before its variables are looked at: it may be one of them.
        self._memo[id(own)] = self._memo[id(made)] = made
        changed = bool(cells) and not _is_global(own)
        for cell, new in zip(cells, now, strict=True):
            changed |= self._fill(cell, new)
        given = own.__defaults__ or (), own.__kwdefaults__ or {}
        defaults = tuple(map(self._content, given[0]))
        named = {key: self._content(value) for key, value in given[1].items()}
        held, now_held = (*given[0], *given[1].values()), (*defaults, *named.values())
        changed |= any(value is not before for value, before in zip(now_held, held, strict=True))
        if not changed:
            self._memo[id(own)] = own
            return own
        made.__defaults__, made.__kwdefaults__ = defaults or None, named or None
        for name in _TOLD:
            setattr(made, name, getattr(own, name))
        for key, value in vars(own).items():
            setattr(made, key, self._content(value))
        return made

    def _fill(self, cell: CellType, new: CellType) -> bool:
        """Give a new variable what the other one holds; return whether that is another object now."""
        try:
            held = cell.cell_contents
        except ValueError:  # it has no value yet
            return False
        if not _is_filled(new):
            new.cell_contents = self._content(held)
        return new.cell_contents is not held

    def _content(self, value: Any) -> Any:
        """Return this replica's copy of what a function holds, or ``value`` where it cannot be copied."""
        if issubclass(type(value), ATOMS):
            return value
        if id(value) not in self._memo:
            known = entries(value, self._memo)
            before = dict(self._memo)
            try:
                self._memo.update(known)
                copy.deepcopy(value, self._memo)
            except Exception:
                # Half-made copies must be found by nobody.
                self._memo.clear()
                self._memo.update(before)
                return value
            self._settle()
        return self.of(self._memo.get(id(value), value))

    def _settle(self) -> None:
        """Let copies be copies of themselves: functions that were made with them know them already."""
        for key, made in [*self._memo.items()]:
            if key != id(self._memo):
                self._memo.setdefault(id(made), made)


def _is_filled(cell: CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _is_global(function: FunctionType) -> bool:
    """Whether a global name leads to ``function``, so that others may reach it by that."""
    found: Any = sys.modules.get(function.__module__)
    for name in function.__qualname__.split("."):
        found = getattr(found, "__dict__", {}).get(name)
    return found is function
