"""What lies in the containers and plain objects of a model, and of functions around it: a look between two steps.

A recorded step holds numbers of the host as they were. Whoever changes one where it lies, as in
``model.scales["aux"] = 0.1``, leaves every attribute the same object.

Nothing of the user's runs in a look: it reads as ``object``, ``list`` and ``dict`` do, whatever a class derived from
these does otherwise. Plain PyTorch asks an object for no more than a model does.
"""

import sys
from argparse import Namespace
from collections import OrderedDict, UserDict, UserList, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dis import get_instructions
from functools import partial
from operator import is_
from types import CellType, FunctionType, MemberDescriptorType, MethodType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

# How deep it is looked; entries of one container, of a larger one their number alone; and entries of all together.
DEPTH, _MOST_OF_ONE, _MOST = 4, 256, 4096
PLAIN = (bool, int, float, complex, str, bytes, type(None))
# What torch and Python keep of their own accord changes without a meaning, as the cache of a logger.
_NOT_THE_USERS = sys.stdlib_module_names | {"torch", "kway"}
_NAMESPACES = (SimpleNamespace, Namespace, UserDict, UserList)
_CONTAINERS = (OrderedDict, dict, list, tuple, set, frozenset, deque)
# What can hold nothing else later.
_FIXED = (tuple, frozenset)
_UNSET = object()

Read = Callable[[Any], Sequence[Any]]
# Names of what is read, one by one; or how those of a dict (keys first), or of what has numbers, are written.
Names = tuple[str, ...] | str
_KEYS, _ATTRIBUTES, _NUMBERS = "keys", "attributes", "numbers"


class Root(NamedTuple):
    """What is looked into. ``place`` says where something lies, by the way to it, which begins with ``path``.

    ``ours``: whether objects of kway's own are looked into as well.
    """

    value: Any
    place: Callable[[str], str]
    path: str = ""
    depth: int = DEPTH
    ours: bool = False


class _Holder(NamedTuple):
    """Something that holds objects, and may hold others later while it stays the same itself."""

    value: Any
    read: Read
    size: int
    names: Names


class Contents:
    """Which objects and numbers lie in some roots, a few levels deep, but for modules among ``known``.

    ``groups``: roots that have a limit of entries together: what holds much hides nothing in the next group.
    What a function closes over counts. Tensors count as objects: work that was recorded reads their numbers itself.
    ``failed`` says what could not be looked at.
    """

    def __init__(self, *groups: Iterable[Root], known: Collection[nn.Module] = ()) -> None:
        self.failed: str | None = None
        # Held, so that no other object can take the place of one.
        self._full: list[tuple[Any, Read, Sequence[Any]]] = []
        self._sizes: list[tuple[Any, Callable[[Any], int], int]] = []
        # Most are torch's own, of hooks.
        self._empty: list[Any] = []
        # What says where these are: of the full ones, and of all others with their sizes.
        self._where: list[tuple[Root, Names]] = []
        self._bare: list[tuple[Root, Any, int]] = []
        for roots in groups:
            self._look_into(roots, known)

    def unchanged(self) -> bool:
        """Whether the same lies there."""
        return (
            not any(self._empty)
            and (not self._sizes or all(size(value) == known for value, size, known in self._sizes))
            and all(same(read(value), known) for value, read, known in self._full)
        )

    def change(self) -> str | None:
        """Say where something else lies now, or ``None``."""
        for root, value, size in self._bare:
            if _container(type(value)).__len__(value) != size:
                return _place(root)
        for (root, names), (value, read, known) in zip(self._where, self._full, strict=True):
            now = read(value)
            if not same(now, known):
                pairs = enumerate(zip(now, known, strict=False))
                number = next((n for n, (a, b) in pairs if not alike(a, b)), None)
                one = number is not None and len(now) == len(known)
                return _place(root, _way(names, known, number or 0) if one else "")
        return None

    def _look_into(self, roots: Iterable[Root], known: Collection[nn.Module]) -> None:
        self._left = _MOST
        self._waiting = deque(roots)
        seen = {id(module) for module in known}
        while self._waiting and self._left > 0:
            root = self._waiting.popleft()
            if type(root.value) in PLAIN or id(root.value) in seen:
                continue
            seen.add(id(root.value))
            try:
                self._waiting += (
                    root._replace(value=part, path=root.path + way) for part, way in _parts(root.value)
                )
                for holder in _holders(root.value, root.ours):
                    if holder.value is root.value or id(holder.value) not in seen:
                        seen.add(id(holder.value))
                        self._add(root, holder)
            except Exception as error:
                self.failed = self.failed or f"{_place(root)} cannot be looked at ({type(error).__name__})"

    def _add(self, root: Root, holder: _Holder) -> None:
        value, read, size, names = holder
        if size > _MOST_OF_ONE:
            self._sizes.append((value, _container(type(value)).__len__, size))
            self._bare.append((root, value, size))
            return
        inside = read(value)
        self._left -= len(inside)
        if not inside and type(value) in _CONTAINERS:
            self._empty.append(value)
            self._bare.append((root, value, 0))
        elif not issubclass(type(value), _FIXED) or names != _NUMBERS:
            self._full.append((value, read, inside))
            self._where.append((root, names))
        if root.depth > 1:
            self._waiting += (
                root._replace(value=entry, path=root.path + _way(names, inside, number), depth=root.depth - 1)
                for number, entry in enumerate(inside)
                if type(entry) not in PLAIN
            )


def same(now: Collection[Any], known: Collection[Any]) -> bool:
    """Whether these are the same objects in the same order, or numbers and texts that say the same."""
    return len(now) == len(known) and (all(map(is_, now, known)) or all(map(alike, now, known)))


def alike(one: Any, other: Any, depth: int = DEPTH) -> bool:
    """Whether these are one object, or plain values, or containers of such, that say the same."""
    kind = type(one)
    if one is other or kind is not type(other):
        return one is other
    # Those that hold nothing beside their entries, as shapes do.
    if issubclass(kind, (tuple, list, dict)) and not kind.__dictoffset__:
        holder, pair = _holding(one), _holding(other)
        return holder.size == pair.size <= _MOST_OF_ONE and _all_alike(
            holder.read(one), pair.read(other), depth
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
        return _all_alike((one.func, one.args, one.keywords), (other.func, other.args, other.keywords), depth)
    return kind is torch.device and bool(one == other)


def _all_alike(one: Collection[Any], other: Collection[Any], depth: int) -> bool:
    return depth > 0 and all(alike(a, b, depth - 1) for a, b in zip(one, other, strict=True))


def _parts(value: Any) -> Iterator[tuple[Any, str]]:
    """Yield what stands for a method or a partial function, and modules that a function reads as global variables,
    each with the way to it.
    """
    if type(value) is MethodType:
        yield from ((value.__self__, ""), (value.__func__, ""))
    elif issubclass(type(value), partial):
        for name, way in (("func", ""), ("args", ".args"), ("keywords", ".keywords")):
            yield object.__getattribute__(value, name), way
    elif type(value) is FunctionType and _is_the_users(value.__module__):
        read = {line.argval for line in get_instructions(value.__code__) if line.opname == "LOAD_GLOBAL"}
        found = {name: dict.get(value.__globals__, name) for name in sorted(read)}
        yield from ((held, f".{name}") for name, held in found.items() if issubclass(type(held), nn.Module))


def _holders(value: Any, ours: bool) -> Iterator[_Holder]:
    """Yield what of ``value`` holds objects. ``ours``: see ``Root``."""
    # Never ``isinstance``: it asks an object of another class for its ``__class__``.
    kind = type(value)
    if issubclass(kind, _CONTAINERS):
        yield _holding(value)
    if kind is FunctionType:
        names = value.__code__.co_freevars
        yield from (
            _Holder(c, _cell, 1, (f".{n}",)) for c, n in zip(value.__closure__ or (), names, strict=True)
        )
        if _is_the_users(value.__module__):
            yield _Holder(value, _of_function, 3, (".__code__", ".__defaults__", ".__kwdefaults__"))
            tables = (value.__defaults__, value.__kwdefaults__)
            yield from (_holding(table) for table in tables if table is not None)
            yield _holding(value.__dict__, _ATTRIBUTES)
    elif issubclass(kind, torch.Tensor | type | ModuleType):
        return
    else:
        module = type.__getattribute__(kind, "__module__")
        own = ours and str(module).partition(".")[0] == "kway"
        if (
            _is_the_users(module)
            or own
            or issubclass(kind, _NAMESPACES)
            or _is_a_module_of_torch(kind, module)
        ):
            yield from _of_object(value, kind)


def _of_object(value: Any, kind: type) -> Iterator[_Holder]:
    try:
        inside = object.__getattribute__(value, "__dict__")
    except AttributeError:
        inside = None
    if issubclass(type(inside), dict):
        if issubclass(kind, nn.Module):
            # As deep as what the module itself holds.
            tables = (inside.get(name) for name in ("_modules", "_parameters", "_buffers"))
            yield from (_holding(table, _ATTRIBUTES) for table in tables if issubclass(type(table), dict))
        yield _holding(inside, _ATTRIBUTES)
    slots = {
        name: slot
        for base in reversed(kind.__mro__)
        if "__slots__" in vars(base) and _is_the_users(base.__module__)
        for name, slot in vars(base).items()
        if type(slot) is MemberDescriptorType
    }
    if slots:
        names = tuple(f".{name}" for name in slots)
        yield _Holder(value, partial(_slotted, tuple(slots.values())), len(slots), names)


def _is_the_users(module: Any) -> bool:
    return not isinstance(module, str) or module.partition(".")[0] not in _NOT_THE_USERS


def _is_a_module_of_torch(kind: type, module: Any) -> bool:
    return issubclass(kind, nn.Module) and str(module).partition(".")[0] != "kway"


def _container(kind: type) -> Any:
    return next(base for base in _CONTAINERS if issubclass(kind, base))


def _holding(value: Any, names: str = _KEYS) -> _Holder:
    base = _container(type(value))
    if not issubclass(base, dict):
        return _Holder(value, partial(_listed, base.__iter__), base.__len__(value), _NUMBERS)
    read = _of_dict if base is dict else _of_ordered
    return _Holder(value, read, dict.__len__(value), names)


def _of_dict(value: dict[Any, Any]) -> Sequence[Any]:
    return [*dict.__iter__(value), *dict.values(value)]


def _of_ordered(value: OrderedDict[Any, Any]) -> Sequence[Any]:
    return [*OrderedDict.__iter__(value), *dict.values(value)]


def _listed(iterate: Callable[[Any], Iterator[Any]], value: Any) -> Sequence[Any]:
    return [*iterate(value)]


def _cell(cell: CellType) -> Sequence[Any]:
    try:
        return (cell.cell_contents,)
    except ValueError:
        return ()


def _of_function(function: FunctionType) -> Sequence[Any]:
    return (function.__code__, function.__defaults__, function.__kwdefaults__)


def _slotted(slots: Sequence[Any], value: Any) -> Sequence[Any]:
    return [_in_slot(slot, value) for slot in slots]


def _in_slot(slot: Any, value: Any) -> Any:
    try:
        return slot.__get__(value)
    except AttributeError:
        return _UNSET


def _place(root: Root, way: str = "") -> str:
    return root.place((root.path + way).removeprefix("."))


def _way(names: Names, entries: Sequence[Any], number: int) -> str:
    """Write the way from a holder to one of its entries."""
    if isinstance(names, tuple):
        return names[number]
    if names == _NUMBERS:
        return f"[{number}]"
    key = entries[number % (len(entries) // 2)]
    # Others may not even be writable.
    if type(key) is str and len(key) < 40:
        return f".{key}" if names == _ATTRIBUTES else f"[{key!r}]"
    return f"[{key}]" if type(key) is int and key.bit_length() < 64 else "[...]"
