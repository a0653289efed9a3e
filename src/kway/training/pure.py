"""Whether a function can be asked without a trace: it reads numbers and texts that stay, and changes nothing.

By its code, before any call: an iterator, a list that grows, a generator of random numbers or a counter would be
another one once it was asked.
"""

import builtins
import cmath
import dis
import math
from collections.abc import Iterator
from functools import partial
from types import CodeType, FunctionType
from typing import Any

import numpy as np

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_MODULES = (math, cmath, np)
# Names in modules that draw, or keep something.
_NOT_PURE = frozenset({"random", "nditer", "memmap", "save", "load", "seterr"})
_CALLED = frozenset(
    {
        "abs",
        "all",
        "any",
        "bool",
        "complex",
        "divmod",
        "enumerate",
        "filter",
        "float",
        "int",
        "len",
        "list",
        "map",
        "max",
    }
    | {"min", "pow", "range", "reversed", "round", "set", "sorted", "str", "sum", "tuple", "zip"}
)
_CHANGES = frozenset({"STORE_GLOBAL", "DELETE_GLOBAL", "STORE_ATTR", "DELETE_ATTR", "IMPORT_NAME"})
_CELLS = frozenset({"STORE_DEREF", "DELETE_DEREF"})
# Functions that call each other, and tuples of tuples.
_DEPTH = 4


def is_pure(value: Any, depth: int = _DEPTH) -> bool:
    """Whether ``value`` is a function, or a ``partial`` of one, that can be asked without a trace."""
    if depth == 0:
        return False
    if isinstance(value, partial):
        held = (*value.args, *value.keywords.values())
        return is_pure(value.func, depth - 1) and all(_stays(each, depth - 1) for each in held)
    if type(value) is not FunctionType or vars(value):
        return False
    code = value.__code__
    try:
        around = [cell.cell_contents for cell in value.__closure__ or ()]
    except ValueError:
        return False
    held = (*around, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
    return (
        not any(
            each.opname in _CELLS and each.argval in code.co_freevars for each in dis.get_instructions(code)
        )
        and all(_stays(each, depth - 1) for each in held)
        and all(_reads(part, value.__globals__, depth - 1) for part in _codes(code))
    )


def _codes(code: CodeType) -> Iterator[CodeType]:
    """Yield a function's code and that of functions inside of it."""
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _codes(each)


def _reads(code: CodeType, around: dict[str, Any], depth: int) -> bool:
    for each in dis.get_instructions(code):
        if each.opname in _CHANGES or each.argval in _NOT_PURE:
            return False
        if each.opname == "LOAD_GLOBAL":
            name = each.argval
            if name not in around:
                # A name that is nowhere is an error of its own when the function is called.
                if name not in _CALLED and hasattr(builtins, name):
                    return False
            elif not _stays(around[name], depth):
                return False
    return True


def _stays(value: Any, depth: int) -> bool:
    if type(value) is tuple:
        return depth > 0 and all(_stays(each, depth - 1) for each in value)
    return type(value) in _PLAIN or any(value is module for module in _MODULES) or is_pure(value, depth)
