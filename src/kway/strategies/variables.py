"""What the code of a model reaches: its own objects, and beyond them variables of files, classes and functions.

Found by Python's own references, so that no container, slot, cache or generator hides what it holds. What torch, numpy,
Python and kway are made of is not looked into.
"""

import dis
import gc
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from logging import Logger
from threading import local
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any
from weakref import ReferenceType

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from kway.step.holders import is_the_users
from kway.step.reach import codes_in, globals_of, names_in, table_of

PLAIN = (str, bytes, int, float, complex, type(None), type(...), torch.device, torch.dtype, torch.Size)
# Data and loggers are shared on purpose; the last two are of a thread by themselves.
_LEFT = (*PLAIN, ModuleType, FrameType, CodeType, Dataset, DataLoader, Logger, local, ContextVar)
_IMPORT = dis.opmap["IMPORT_NAME"]
_ABSENT = object()


@dataclass(frozen=True)
class Thing:
    """An object, or a variable of one: entry ``name`` of ``of``. ``label``: what a user calls it."""

    label: str
    of: Any
    name: str | None = None

    @property
    def key(self) -> tuple[int, str | None]:
        """Return what tells it from all others that live."""
        return id(self.of), self.name

    def content(self) -> list[Any]:
        """Return what it refers to now."""
        if self.name is not None:
            held = vars(self.of) if isinstance(self.of, type | ModuleType) else self.of
            return [held.get(self.name, _ABSENT)]
        return referred(self.of)


def referred(value: Any) -> list[Any]:
    """Return what an object refers to itself, attributes first."""
    table = table_of(value)
    if issubclass(type(value), torch.Tensor):
        return [*dict.values(table)]
    known = {id(each) for each in dict.values(table)}
    # Python lists attributes, or the table of them, by how the object lies in memory just now.
    return [
        *dict.values(table),
        *(x for x in gc.get_referents(value) if x is not table and id(x) not in known),
    ]


def things_in(roots: Mapping[str, Any]) -> dict[tuple[int, str | None], Thing]:
    """Return all that code of ``roots``, by what they are called, comes by: objects and variables, nearest first."""
    found: dict[tuple[int, str | None], Thing] = {}
    waiting = deque(Thing(label, value) for label, value in roots.items())
    while waiting:
        thing = waiting.popleft()
        if thing.key in found or (thing.name is None and issubclass(type(thing.of), _LEFT)):
            continue
        inside = _inside(thing)
        if inside is not None:
            found[thing.key] = thing
            waiting += inside
    return found


def _inside(thing: Thing) -> Iterable[Thing] | None:
    """Return what ``thing`` leads to; ``None`` where it is not looked at."""
    value = thing.of
    if thing.name is not None:
        return [Thing(thing.label, each) for each in thing.content() if each is not _ABSENT]
    if isinstance(value, type):
        return None if _foreign(value.__module__) else _of_class(value)
    if isinstance(value, FunctionType):
        return None if _foreign(value.__globals__.get("__name__")) else _of_function(value)
    kind = type(value)
    if kind is dict and "__builtins__" in value:
        return None
    # Not by the attribute: a class may say something else of its objects.
    if str(type.__getattribute__(kind, "__module__")).partition(".")[0] == "kway":
        return None
    if issubclass(kind, ReferenceType):
        return [Thing(thing.label, value())]
    return _of_object(thing, value)


def _of_object(thing: Thing, value: Any) -> Iterator[Thing]:
    table = table_of(value)
    kind = type(value).__qualname__
    for name, each in dict.items(table):
        # An attribute of a layer tells more than how one comes to the layer; containers have none.
        yield Thing(f"attribute {name!r} of {kind}" if name[:1] != "_" else thing.label, each)
    yield from (Thing(thing.label, each) for each in referred(value)[len(table) :])


def _of_class(value: type) -> Iterator[Thing]:
    for name in [*vars(value)]:
        is_method = isinstance(vars(value)[name], FunctionType)
        # What Python keeps there itself goes by such names. A step makes no layers: their __init__ tells nothing.
        if name[:2] != "__" or (is_method and not (name == "__init__" and issubclass(value, nn.Module))):
            yield Thing(f"attribute {name!r} of class {value.__qualname__}", value, name)
    yield from (Thing(f"class {each.__qualname__}", each) for each in (*value.__bases__, type(value)))


def _of_function(value: FunctionType) -> Iterator[Thing]:
    named = value.__qualname__
    for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
        yield Thing(f"variable {name!r} that {named} closes over", cell)
    for each in (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()):
        yield Thing(f"a default argument of {named}", each)
    held = vars(value)
    yield from (Thing(f"attribute {name!r} of {named}", held, name) for name in [*held])
    for code in codes_in(value.__code__):
        yield from _of_code(code, value.__globals__)


def _of_code(code: CodeType, names: dict[str, Any]) -> Iterator[Thing]:
    used = names_in(code)
    for name in globals_of(code, names):
        value = names.get(name)
        if isinstance(value, ModuleType):
            yield from _of_module(value, used)
        else:
            yield Thing(f"the global variable {name!r}", names, name)
    for module in _imported(code, names):
        yield from _of_module(module, used)


def _of_module(module: ModuleType, used: set[str]) -> Iterator[Thing]:
    """Yield the variables of a module, and of those that it names, that code ``used`` by name may read."""
    waiting, seen = [module], set[int]()
    while waiting:
        one = waiting.pop()
        if id(one) in seen or _foreign(one.__name__):
            continue
        seen.add(id(one))
        for name in used & vars(one).keys():
            value = vars(one)[name]
            if isinstance(value, ModuleType):
                waiting.append(value)
            else:
                yield Thing(f"the variable {name!r} of {one.__name__}", one, name)


def _foreign(module: Any) -> bool:
    """Whether a module, by name, is none that a user or a package of models brings."""
    return not is_the_users(module) or str(module).partition(".")[0] == "numpy"


def _imported(code: CodeType, names: dict[str, Any]) -> Iterator[ModuleType]:
    """Yield the modules that ``code`` itself imports, as far as they are loaded."""
    if _IMPORT not in code.co_code[::2]:
        return
    package = str(names.get("__package__") or "")
    # A name that begins with dots is one of a package above; without them here.
    above = [package.rsplit(".", count)[0] for count in range(package.count(".") + 1)] if package else []
    for step in dis.get_instructions(code):
        if step.opcode == _IMPORT:
            for name in (step.argval, *(f"{each}.{step.argval}".rstrip(".") for each in above)):
                if isinstance(sys.modules.get(name), ModuleType):
                    yield sys.modules[name]
