"""What lies in values: what they hold, and where asked for, what their functions know."""

import dis
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from functools import partial
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FunctionType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any
from weakref import ReferenceType

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from kway.step.holders import is_the_users

ATOMS = (str, bytes, int, float, bool, complex, type(None), type, torch.device, torch.dtype)
CONTAINERS = (dict, list, set, deque)
CODE = (FunctionType, MethodType, BuiltinFunctionType, ReferenceType, partial)
_GLOBAL = {"LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL"}
# What a hook has no reason to keep a loss in, and may be large.
_LEAVES = (torch.Tensor, np.ndarray, ModuleType, Dataset, DataLoader)
# A container of more entries is a table of the user's, a vocabulary say.
_MANY = 10_000
_ITERATED: tuple[Any, ...] = (list, tuple, set, frozenset, deque)


def walked(
    roots: Iterable[Any],
    leaves: Callable[[Any], bool],
    known: Container[int] = (),
    functions: bool = False,
) -> Iterator[Any]:
    """Yield what lies in ``roots``, and these.

    ``leaves`` says what is not looked into; ``known``: ids that are left out; ``functions``: whether functions are
    looked into, and what of theirs stands for others (methods, partial functions, weak references).
    """
    waiting, seen, slots = [*roots], set[int](), dict[type, list[MemberDescriptorType]]()
    while waiting:
        value = waiting.pop()
        kind = type(value)
        if id(value) in known or id(value) in seen or issubclass(kind, ATOMS):
            continue
        seen.add(id(value))
        yield value
        if leaves(value):
            continue
        waiting += entries_of(value)
        # The table may be the value itself, with entries named like its methods.
        waiting += dict.values(table_of(value))
        if not issubclass(kind, CODE):
            if kind not in slots:
                slots[kind] = slots_of(kind)
            waiting += (slot.__get__(value) for slot in slots[kind] if is_set(slot, value))
        elif functions:
            waiting += _known(value)


def reached(roots: Iterable[Any]) -> Iterator[Any]:
    """Yield what code in ``roots`` can get at by what it holds or closes over, and by global variables of the user's.

    Nothing is looked for in tensors, arrays, data sets and large tables, nor in what kway itself has hung on a model.
    """
    return walked(roots, ends, functions=True)


def ends(value: Any) -> bool:
    """Whether ``reached`` does not look into ``value``."""
    kind = type(value)
    if issubclass(kind, nn.Module):
        return False
    module = value.__module__ if kind is FunctionType else type.__getattribute__(kind, "__module__")
    return issubclass(kind, _LEAVES) or _is_large(value) or str(module).partition(".")[0] == "kway"


def codes_in(code: CodeType) -> Iterator[CodeType]:
    """Yield ``code``, and that of the functions, classes and generators that are made in it."""
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from codes_in(each)


def names_in(code: CodeType) -> set[str]:
    """Return the names by which ``code`` may come by a variable; ``setattr`` and ``globals()`` take them as texts."""
    return {*code.co_names, *(each for each in code.co_consts if isinstance(each, str))}


def globals_of(code: CodeType, around: Mapping[str, Any]) -> set[str]:
    """Return which global variables, those of ``around``, ``code`` itself reads or writes."""
    by_text = "globals" in code.co_names
    found = {each for each in names_in(code) if each in around} if by_text else set[str]()
    if not any(name in around for name in code.co_names):
        return found
    steps = dis.get_instructions(code)
    return found | {step.argval for step in steps if step.opname in _GLOBAL and step.argval in around}


def entries_of(value: Any) -> Iterable[Any]:
    """Return what lies in a container, without its keys, by what it is derived from: a class may have its own way."""
    kind = type(value)
    if issubclass(kind, dict):
        return dict.values(value)
    for base in _ITERATED:
        if issubclass(kind, base):
            return base.__iter__(value)  # type: ignore[no-any-return]
    return ()


def _is_large(value: Any) -> bool:
    kind = type(value)
    return any(issubclass(kind, base) and base.__len__(value) > _MANY for base in (dict, *_ITERATED))


def table_of(value: Any) -> dict[str, Any]:
    """Return the attributes of ``value``, to be read or written: none where it has no table of them."""
    try:
        held = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return held if isinstance(held, dict) else {}


def slots_of(kind: type) -> list[MemberDescriptorType]:
    """Return the places that objects of a class have beside a table: ``__slots__``, and that of a ``defaultdict``."""
    return [
        place
        for base in kind.__mro__
        for name, place in vars(base).items()
        if type(place) is MemberDescriptorType and name != "__weakref__"
    ]


def is_set(slot: MemberDescriptorType, value: Any) -> bool:
    """Whether there is something in this place of ``value``."""
    try:
        slot.__get__(value)
    except AttributeError:
        return False
    return True


def is_filled(cell: CellType) -> bool:
    """Whether a variable that functions close over has a value yet."""
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _known(value: Any) -> list[Any]:
    if isinstance(value, partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, ReferenceType):
        return [value()]
    if isinstance(value, BuiltinFunctionType):
        return [value.__self__]
    held = [cell.cell_contents for cell in value.__closure__ or () if is_filled(cell)]
    around = value.__globals__
    codes = codes_in(value.__code__) if is_the_users(value.__module__) else ()
    read = (around[name] for code in codes for name in globals_of(code, around))
    return [*held, value.__defaults__, value.__kwdefaults__, *read]
