"""What tells the code of one function, class or object, with all that it calls, from another's, without running it."""

import hashlib
from argparse import Namespace
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import islice
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn

from kway.tuning.bytecode import code_text, constant, global_names, names_in
from kway.tuning.classes import members, state_names
from kway.tuning.libraries import is_library, name_of
from kway.tuning.lists import MOST_ITEMS, PLAIN, holds_nothing, inside

# Of a function that is not defined yet where another one knows it.
_EMPTY = CellType()
# More functions, classes and objects are not looked at.
MOST = 100_000
_NAMED = (type, FunctionType, MethodType, BuiltinFunctionType)
# Of what torch keeps in every module, that which may hold code of the user's.
_OF_TORCH = vars(nn.Module()).keys() - {"_parameters", "_forward_hooks", "_forward_pre_hooks"}


def code_of(value: Any, lists: bool = True, values: bool = True) -> str:
    """Return what tells a function, class, ``partial`` or object from others: its name and a digest.

    The digest is of its code, of what that calls, wherever it is found (globals, modules of the user's, closures,
    defaults, attributes, methods of classes), and of plain values there; of torch and installed packages it is of the
    name and version. ``lists``: whether plain values in lists and dicts count, which may change while a run goes on;
    ``values``: whether any do, beside those in code, which may be others in each process.
    """
    if value is None:
        return ""
    told = hashlib.sha256("\n".join(_Walk(lists, values).told(value)).encode()).hexdigest()[:12]
    named = value
    while isinstance(named, partial):
        named = named.func
    return f"{name_of(named if isinstance(named, _NAMED) else type(named))}:{told}"


def object_code(value: Any) -> str:
    """Return what tells an object's code from another's: ``code_of``, without what lists hold; ``""`` for an object of
    torch's or of an installed package, which has no code of its own.
    """
    return "" if is_library(type(value).__module__) else code_of(value, lists=False)


class _Walk:
    """Looks at what is reached from a value, nearest first, each once; how deep it lies makes no difference."""

    def __init__(self, lists: bool, values: bool) -> None:
        self._lists, self._values = lists, values
        # With the number by which others name it; held, since an id may be given again.
        self._seen: dict[int, tuple[int, Any]] = {}
        self._waiting: deque[tuple[Any, bool]] = deque()
        self._states: dict[type, set[str]] = {}

    def told(self, value: Any) -> Iterator[str]:
        """Yield a line for each thing that is reached."""
        yield self._named(value)
        while self._waiting and len(self._seen) < MOST:
            each, plain = self._waiting.popleft()
            try:
                line = self._line(each, plain)
            except Exception:  # what an object of the user's is asked for may fail in any way
                line = type(each).__name__
            yield line

    def _named(self, value: Any, plain: bool = True) -> str:
        """Return the text by which ``value`` counts where it is found; what has more to tell gets a line later.

        ``plain``: whether values that are no code count.
        """
        try:
            return self._name(value, plain and self._values)
        except Exception:
            return type(value).__name__

    def _name(self, value: Any, plain: bool) -> str:
        kind = type(value)
        if kind in PLAIN:
            return PLAIN[kind](value) if plain else ""
        if _is(value, nn.Parameter):
            size = "" if torch.nn.parameter.is_lazy(value) else list(value.shape)
            return f"parameter {size} {value.dtype}" if plain else ""
        counts = plain and (self._lists or not _is(value, dict | list))
        if _is(value, torch.Tensor | ModuleType) or holds_nothing(value, counts):
            return ""
        if id(value) not in self._seen:
            self._seen[id(value)] = len(self._seen), value
            self._waiting.append((value, plain))
        return f"#{self._seen[id(value)][0]}"

    def _items(self, items: Iterable[tuple[Any, Any]], plain: bool = True) -> str:
        texts = ((key, self._named(value, plain)) for key, value in items)
        return ", ".join(f"{key}={text}" for key, text in texts if text)

    def _line(self, value: Any, plain: bool) -> str:
        if _is(value, FunctionType):
            return self._function(value)
        if _is(value, MethodType):
            return f"method {self._named(value.__func__)} {self._named(value.__self__)}"
        if _is(value, partial):
            given: dict[Any, Any] = {"": value.func, **dict(enumerate(value.args)), **value.keywords}
            return f"partial {self._items(given.items())}"
        if _is(value, type):
            return self._class(value)
        if _is(value, frozenset):
            return constant(frozenset(self._named(each, plain) for each in value if type(each) in PLAIN))
        if _is(value, list | tuple):
            counts = plain and (self._lists or not _is(value, list))
            return f"list {self._items(islice(enumerate(inside(value)), MOST_ITEMS), counts)}"
        if _is(value, dict | SimpleNamespace | Namespace):
            value = value if _is(value, dict) else vars(value)
            # Keys that are numbers may be counted up by the process, as torch does for hooks.
            held = islice(dict.items(value), MOST_ITEMS)
            named = ((key if type(key) is str else "", each) for key, each in held)
            return f"dict {self._items(named, plain and self._lists)}"
        return self._object(value)

    def _function(self, function: FunctionType) -> str:
        code = function.__code__
        cells = zip(code.co_freevars, function.__closure__ or (), strict=False)
        around = {key: cell.cell_contents for key, cell in cells if cell != _EMPTY}
        defaults: dict[Any, Any] = dict(enumerate(function.__defaults__ or ()))
        defaults |= function.__kwdefaults__ or {}
        if is_library(function.__module__):
            # By its closure it knows what it wraps.
            return f"{name_of(function)} {self._items(around.items(), plain=False)}"
        given = f"{name_of(function)} [{self._items(around.items())}] [{self._items(defaults.items())}]"
        used = self._items(self._globals(function))
        return f"{given} {code_text(code)} {used}"

    def _globals(self, function: FunctionType) -> Iterator[tuple[str, Any]]:
        """Yield what a function finds among its globals, and in modules of the user's there, by name."""
        names = names_in(function.__code__)
        seen: set[int] = set()
        waiting = [(name, function.__globals__.get(name)) for name in global_names(function.__code__)]
        while waiting:
            name, value = waiting.pop(0)
            if not isinstance(value, ModuleType):
                yield name, value
            elif id(value) not in seen and not is_library(value.__name__):
                seen.add(id(value))
                held = vars(value)
                waiting += [(f"{name}.{each}", held[each]) for each in sorted(names & held.keys())]

    def _class(self, kind: type) -> str:
        if is_library(kind.__module__):
            return name_of(kind)
        bases = " ".join(self._named(base) for base in kind.__bases__)
        held = [(name, each) for key, value in vars(kind).items() for name, each in members(key, value)]
        return f"class {name_of(kind)} ({bases}) {self._items(held)}"

    def _object(self, value: Any) -> str:
        kind = type(value)
        held: Mapping[str, Any] = {}
        with suppress(AttributeError):
            held = object.__getattribute__(value, "__dict__")
        own = not is_library(kind.__module__)
        if _is(value, nn.Module) or own:
            if own and kind not in self._states:
                self._states[kind] = state_names(kind)
            left = self._states.get(kind, set()) | (_OF_TORCH if _is(value, nn.Module) else set())
            # The last are numbers of what torch.compile made in this process.
            kept = [name for name in held if name not in left and not name.startswith("_torchdynamo")]
            shown = {name: held[name] for name in sorted(kept)}
            if _is(value, nn.Module):
                shown |= held.get("_modules", {})
            return f"object {self._named(kind)} {self._items(shown.items())}"
        if _is(value, torch.utils.data.Dataset | torch.utils.data.DataLoader):
            return f"object {name_of(kind)} {self._items(sorted(held.items()), plain=False)}"
        # What functools.cache and the like make is of no class of the user's.
        named = name_of(value if _is(value, _NAMED) else kind)
        return f"{named} {self._named(held.get('__wrapped__'))}"


def _is(value: Any, kinds: Any) -> bool:
    """Whether a value is of one of some classes, without asking it: a proxy says that it is of another."""
    return issubclass(type(value), kinds)
