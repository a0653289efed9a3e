"""Functions for each copy of a model: ``copy.deepcopy`` leaves functions, and all that they close over, shared.

A hook keeps what a layer returned in a dict that it closes over, and forward asks another function for it: a replica
must find its own there, whatever the others do meanwhile, and what is tried on a copy must not write to the user's.
"""

import copy
import sys
from collections import OrderedDict, deque
from collections.abc import Iterable
from contextlib import suppress
from functools import lru_cache, partial
from itertools import islice
from operator import is_
from types import BuiltinFunctionType, CellType, FunctionType, MemberDescriptorType, MethodType
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import nn

from kway.launch.parameter_hooks import hang, hooks_on
from kway.step.process_wide import drawn_from
from kway.step.reach import ATOMS, CONTAINERS, is_filled, is_set, slots_of, table_of
from kway.training.own_contents import entries

_CACHE = type(lru_cache(len))
# Of these classes is what ``of`` may replace.
_REPLACED = (FunctionType, MethodType, BuiltinFunctionType, _CACHE, ReferenceType, tuple, frozenset)
# What a function has beside its code, defaults and attributes; annotations are computed when asked for where they can.
_TOLD = (
    "__module__",
    "__qualname__",
    "__doc__",
    "__annotate__" if sys.version_info >= (3, 14) else "__annotations__",
)


def of_process() -> dict[int, Any]:
    """Return a memo for ``copy.deepcopy``, by id, of the generators that a process has for all code."""
    return {id(each): each for each in drawn_from()}


def copies(
    values: tuple[Any, ...], memo: dict[int, Any], modules: Iterable[nn.Module] = ()
) -> tuple[Any, ...]:
    """Return copies of ``values``, as ``copy.deepcopy`` makes them with ``memo``, with functions of their own.

    A function is made again where it closes over variables, or has defaults that can change. Variables, and what they
    hold, are copied through ``memo``: once, for all functions and attributes that know them, and what of it is a part
    of the model is that of the copy. A cache of such a function (``functools.lru_cache``) is made again, and empty.
    What cannot be copied (a lock, a file) stays shared, and so does what functions reach by global names, or through
    their class. Weak references to what was copied lead to the copy. ``modules``: those in ``values`` whose parameters
    are trained, or frozen, in the copy as well, and keep the hooks that ``copy.deepcopy`` leaves behind.

    Raises what keeps ``copy.deepcopy`` from it; half-made copies are in ``memo`` then.
    """
    modules = [*modules]
    parameters = list(dict.fromkeys(each for module in modules for each in module.parameters()))
    # Before all else, and empty: handles that lie in values or functions are copied with the table that they know.
    tables = [table for each in parameters for table in hooks_on(each) if table]
    memo.update({id(table): OrderedDict() for table in tables})
    # With gradients, scripted layers would copy their parameters as results of something.
    with torch.no_grad():
        made = copy.deepcopy(values, memo)
        for module in modules:
            # Not by the memo, which knows none of the parameters of a scripted layer.
            pairs = zip(module.parameters(), memo.get(id(module), module).parameters(), strict=True)
            for own, new in pairs:
                if new is not own:
                    new.requires_grad_(own.requires_grad)
                    # Copies of parameters lack what was noted on them, such as that they do not decay.
                    vars(new).update(copy.deepcopy(vars(own), memo))
        return _with_own_functions(made, memo, parameters)


def _with_own_functions(
    made: tuple[Any, ...], memo: dict[int, Any], parameters: Iterable[nn.Parameter]
) -> tuple[Any, ...]:
    """Return ``made``, copies, with functions of its own in place of shared ones."""
    own = _Own(memo)
    made = tuple(map(own.of, made))
    for parameter in parameters:
        own.hang(parameter)
    done = 0
    # What comes to a dict comes last.
    while waiting := [*islice(memo, done, None)]:
        done += len(waiting)
        for key in waiting:
            # Under its own id lies what is shared, or was copied before; under the memo's, what deepcopy keeps alive.
            if key not in (id(memo), id(memo[key])):
                own.refill(memo[key])
    return made


class _Own:
    """What is to stand in copies in place of a value that ``copy.deepcopy`` has left as it is."""

    def __init__(self, memo: dict[int, Any]) -> None:
        self._memo = memo
        self._settled = 0
        self._slots: dict[type, list[MemberDescriptorType]] = {}
        # Of what cannot be copied, by id, so that nobody tries again.
        self._refused: dict[int, Any] = {}
        self._settle()

    def refill(self, made: Any) -> None:
        """Replace what ``made``, a copy, holds itself."""
        kind = type(made)
        if issubclass(kind, partial):
            # Its function and arguments cannot be written to one by one.
            state: Any = (self.of(made.func), self.of(made.args), made.keywords, vars(made))
            partial.__setstate__(made, state)  # type: ignore[attr-defined]
            self._replace_in(dict, made.keywords)
        elif issubclass(kind, set):
            if _may_change(made):
                now = [self.of(value) for value in made]
                made.clear()
                made.update(now)
        elif issubclass(kind, list | deque):
            self._replace_in(list if issubclass(kind, list) else deque, made)
        elif issubclass(kind, dict):
            self._replace_in(dict, made)
            self._rename(made)
        self._replace_in(dict, table_of(made))
        if kind not in self._slots:
            self._slots[kind] = slots_of(kind)
        for slot in self._slots[kind]:
            if is_set(slot, made) and (now := self.of(value := slot.__get__(made))) is not value:
                # Some of Python's own cannot be written to.
                with suppress(AttributeError, TypeError):
                    slot.__set__(made, now)

    def hang(self, parameter: nn.Parameter) -> None:
        """Give the copy of a parameter hooks as the parameter has."""
        made, tables = self._memo.get(id(parameter), parameter), hooks_on(parameter)
        if made is parameter or not tables:
            return
        for table in filter(None, tables):
            new = self._memo[id(table)]
            new.update({number: self._content(hook) for number, hook in table.items() if number not in new})
        hang(made, [table and self._memo[id(table)] for table in tables])

    def _replace_in(self, kind: Any, made: Any) -> None:
        """Replace the entries of a container that is derived from ``kind``."""
        if _may_change(dict.values(made) if kind is dict else made):
            items = [*(dict.items(made) if kind is dict else enumerate(made))]
            for place, now in [
                (place, now) for place, value in items if (now := self.of(value)) is not value
            ]:
                # Of a class of the user's, which may refuse to be written to.
                kind.__setitem__(made, place, now)

    def _rename(self, made: dict[Any, Any]) -> None:
        """Let functions that are keys be those of the copy."""
        if not _may_change(dict.keys(made)):
            return
        items = [(self.of(key), value) for key, value in dict.items(made)]
        if not all(name is key for (name, _), key in zip(items, made, strict=True)):
            made.clear()
            for name, value in items:
                made[name] = value

    def of(self, value: Any) -> Any:
        """Return what stands for ``value``, which a copy holds."""
        kind = type(value)
        if kind is FunctionType:
            return self._function(value)
        if kind is MethodType:
            function, holder = self.of(value.__func__), self._content(value.__self__)
            same = function is value.__func__ and holder is value.__self__
            return value if same else MethodType(function, holder)
        if kind is _CACHE:
            return self._cache(value)
        if kind is BuiltinFunctionType and isinstance(value.__self__, CONTAINERS):
            holder = self._content(value.__self__)
            return value if holder is value.__self__ else getattr(holder, value.__name__)
        if kind is ReferenceType:
            target = value()
            now = self._memo.get(id(target), target)
            return value if now is target else ref(now)
        if issubclass(kind, tuple | frozenset):
            items = [self.of(item) for item in value]
            same = all(map(is_, items, value))
            base: Any = tuple if issubclass(kind, tuple) else frozenset
            return value if same else base.__new__(kind, items)
        return value

    def _cache(self, own: Any) -> Any:
        if id(own) not in self._memo:
            function = own.__wrapped__
            now = function if _is_global(own) else self._content(function)
            # It may be what its function calls, and be made by now.
            if id(own) not in self._memo:
                made = own if now is function else lru_cache(**own.cache_parameters())(now)
                self._keep(own, made)
        return self._memo[id(own)]

    def _keep(self, own: Any, made: Any) -> None:
        # Ids are of what lives.
        self._memo.setdefault(id(self._memo), []).append(own)
        self._memo[id(own)] = self._memo[id(made)] = made

    def _function(self, own: FunctionType) -> FunctionType:
        if id(own) in self._memo:
            return self._memo[id(own)]  # type: ignore[no-any-return]
        cells = own.__closure__ or ()
        if not cells and not own.__defaults__ and not own.__kwdefaults__:
            return own
        now = [self._memo.setdefault(id(cell), CellType()) for cell in cells]
        made = FunctionType(own.__code__, own.__globals__, own.__name__, None, tuple(now))
        # Before its variables are looked at: it may be one of them.
        self._keep(own, made)
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
        if not is_filled(new):
            new.cell_contents = self._content(held)
        return new.cell_contents is not held

    def _content(self, value: Any) -> Any:
        """Return the copy of what a function holds, or ``value`` where it cannot be copied."""
        if issubclass(type(value), ATOMS):
            return value
        if id(value) in self._refused:
            return value
        if id(value) not in self._memo:
            before = len(self._memo)
            try:
                known = entries(value, self._memo)
                self._memo.update({key: made for key, made in known.items() if key not in self._memo})
                copy.deepcopy(value, self._memo)
            except Exception:
                # Half-made copies must be found by nobody.
                while len(self._memo) > before:
                    self._memo.popitem()
                self._refused[id(value)] = value
                return value
            self._settle()
        return self.of(self._memo.get(id(value), value))

    def _settle(self) -> None:
        """Let copies be copies of themselves: functions that were made with them know them already."""
        # New ones come last; the last first.
        new = [*islice(reversed(self._memo.items()), len(self._memo) - self._settled)]
        for key, made in reversed(new):
            if key != id(self._memo):
                self._memo.setdefault(id(made), made)
        self._settled = len(self._memo)


def _may_change(values: Iterable[Any]) -> bool:
    """Whether some of ``values`` are of a kind that is replaced: most containers hold much, and none of it."""
    return any(issubclass(kind, _REPLACED) for kind in {*map(type, values)})


def _is_global(function: Any) -> bool:
    """Whether a global name leads to ``function``, so that others may reach it by that."""
    found: Any = sys.modules.get(function.__module__)
    for name in function.__qualname__.split("."):
        found = getattr(found, "__dict__", {}).get(name)
    return found is function
