"""What of a value holds others, and how that is read, without a call of anything of the user's.

It is read as ``object``, ``list`` and ``dict`` do, whatever a class derived from these does otherwise: plain PyTorch
asks an object for no more than a model does.
"""

import sys
from argparse import Namespace
from collections import ChainMap, OrderedDict, UserDict, UserList, deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import CellType, FunctionType, MemberDescriptorType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn

# What torch and Python keep of their own accord changes without a meaning, as the cache of a logger.
_NOT_THE_USERS = sys.stdlib_module_names | {"torch", "kway"}
_NAMESPACES = (SimpleNamespace, Namespace, UserDict, UserList, ChainMap)
CONTAINERS = (OrderedDict, dict, list, tuple, set, frozenset, deque)
# What can hold nothing else later.
FIXED = (tuple, frozenset)
_UNSET = object()

Read = Callable[[Any], Sequence[Any]]
# Names of what is read, one by one; or how those of a dict (keys first), or of what has numbers, are written.
Names = tuple[str, ...] | str
KEYS, ATTRIBUTES, NUMBERS = "keys", "attributes", "numbers"


class Holder(NamedTuple):
    """Something that holds objects, and may hold others later while it stays the same itself."""

    value: Any
    read: Read
    size: int
    names: Names


def holders_of(value: Any, ours: bool) -> Iterator[Holder]:
    """Yield what of ``value`` holds objects. ``ours``: whether objects of kway's own count as well."""
    # Never ``isinstance``: it asks an object of another class for its ``__class__``.
    kind = type(value)
    if issubclass(kind, CONTAINERS):
        yield holding(value)
    if kind is FunctionType:
        names = value.__code__.co_freevars
        yield from (
            Holder(c, _cell, 1, (f".{n}",)) for c, n in zip(value.__closure__ or (), names, strict=True)
        )
        if is_the_users(value.__module__):
            yield Holder(value, _of_function, 3, (".__code__", ".__defaults__", ".__kwdefaults__"))
            tables = (value.__defaults__, value.__kwdefaults__)
            yield from (holding(table) for table in tables if table is not None)
            yield holding(value.__dict__, ATTRIBUTES)
    elif issubclass(kind, torch.Tensor | type | ModuleType):
        return
    else:
        module = type.__getattribute__(kind, "__module__")
        own = ours and str(module).partition(".")[0] == "kway"
        if (
            is_the_users(module)
            or own
            or issubclass(kind, _NAMESPACES)
            or _is_a_module_of_torch(kind, module)
        ):
            yield from _of_object(value, kind)


def _of_object(value: Any, kind: type) -> Iterator[Holder]:
    try:
        inside = object.__getattribute__(value, "__dict__")
    except AttributeError:
        inside = None
    if issubclass(type(inside), dict):
        if issubclass(kind, nn.Module):
            # As deep as what the module itself holds.
            tables = (inside.get(name) for name in ("_modules", "_parameters", "_buffers"))
            yield from (holding(table, ATTRIBUTES) for table in tables if issubclass(type(table), dict))
        yield holding(inside, ATTRIBUTES)
    slots = {
        name: slot
        for base in reversed(kind.__mro__)
        if "__slots__" in vars(base) and is_the_users(base.__module__)
        for name, slot in vars(base).items()
        if type(slot) is MemberDescriptorType
    }
    if slots:
        names = tuple(f".{name}" for name in slots)
        yield Holder(value, partial(_slotted, tuple(slots.values())), len(slots), names)


def is_the_users(module: Any) -> bool:
    """Whether what is defined in this module (its name) is neither torch's, nor Python's, nor kway's."""
    return not isinstance(module, str) or module.partition(".")[0] not in _NOT_THE_USERS


def _is_a_module_of_torch(kind: type, module: Any) -> bool:
    return issubclass(kind, nn.Module) and str(module).partition(".")[0] != "kway"


def container(kind: type) -> Any:
    """Return the container of Python's from which a class is derived."""
    return next(base for base in CONTAINERS if issubclass(kind, base))


def holding(value: Any, names: str = KEYS) -> Holder:
    """Return what a container holds. ``names``: how those of a dict are written."""
    base = container(type(value))
    if not issubclass(base, dict):
        return Holder(value, partial(_listed, base.__iter__), base.__len__(value), NUMBERS)
    read = _of_dict if base is dict else _of_ordered
    return Holder(value, read, dict.__len__(value), names)


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
