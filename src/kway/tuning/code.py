"""What tells the code of one function, or of one object, from another's, without running any of it."""

import hashlib
from collections.abc import Iterator, Mapping
from functools import partial
from types import CellType, CodeType, FunctionType
from typing import Any

# Of a function that is not defined yet where another one knows it.
_EMPTY = CellType()
_PLAIN = (bool, int, float, str, bytes, tuple, frozenset)
# Code that versions stand for.
_LIBRARIES = ("torch.", "kway.", "builtins")


def object_code(value: Any) -> str:
    """Return what tells an object's code from another's: the methods of its class, what they call, plain attributes.

    An object of torch's or kway's own has no code of its own.
    """
    kind = type(value)
    if f"{kind.__module__}.".startswith(_LIBRARIES):
        return ""
    seen: set[int] = set()
    told = [text for each in _methods(kind) for text in _with_what_it_calls(each, seen)]
    # Whether a module trains at the moment is no part of what it is.
    own = {key: each for key, each in getattr(value, "__dict__", {}).items() if key != "training"}
    digest = hashlib.sha256(repr((told, _given(own))).encode()).hexdigest()[:12]
    return f"{kind.__module__}.{kind.__qualname__}:{digest}"


def _methods(kind: type) -> Iterator[FunctionType]:
    """Yield the functions of a class and of those that it is derived from, in their order."""
    for each in kind.__mro__:
        if f"{each.__module__}.".startswith(_LIBRARIES):
            continue
        for value in vars(each).values():
            function = getattr(value, "fget", None) or getattr(value, "__func__", value)
            if isinstance(function, FunctionType):
                yield function


def _with_what_it_calls(function: FunctionType, seen: set[int]) -> Iterator[str]:
    """Yield the code of a function and of the functions it finds among its globals, with the plain values there."""
    if id(function) in seen:
        return
    seen.add(id(function))
    yield code_of(function)
    for name in sorted(_names(function.__code__)):
        value = function.__globals__.get(name)
        if isinstance(value, _PLAIN):
            yield f"{name}={_constant(value)}"
        elif isinstance(value, FunctionType) and not f"{value.__module__}.".startswith(_LIBRARIES):
            yield from _with_what_it_calls(value, seen)


def _names(code: CodeType) -> set[str]:
    inner = (each for each in code.co_consts if isinstance(each, CodeType))
    return set(code.co_names).union(*map(_names, inner))


def code_of(function: Any) -> str:
    """Return what tells a function from others: its name, a digest of its code, and of what a ``partial`` of it, its
    defaults or the function around it have given it, what is plain or a function.
    """
    if function is None:
        return ""
    if isinstance(function, partial):
        return f"{code_of(function.func)}({_given({**dict(enumerate(function.args)), **function.keywords})})"
    code = getattr(function, "__code__", None)
    name = (
        f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', type(function).__name__)}"
    )
    if code is None:
        return name
    digest = hashlib.sha256(_code(code).encode()).hexdigest()[:12]
    cells = zip(code.co_freevars, getattr(function, "__closure__", None) or (), strict=False)
    around = {key: cell.cell_contents for key, cell in cells if cell != _EMPTY}
    defaults = {**dict(enumerate(getattr(function, "__defaults__", None) or ()))}
    defaults |= getattr(function, "__kwdefaults__", None) or {}
    given = [
        _given({name: value for name, value in each.items() if value is not function})
        for each in (around, defaults)
    ]
    return f"{name}:{digest}" + "".join(f"[{each}]" for each in given if each)


def _given(values: Mapping[Any, Any]) -> str:
    """Write what of some values tells one call from another, whatever order sets are in."""
    told = {
        key: _constant(value) if isinstance(value, _PLAIN) else code_of(value)
        for key, value in values.items()
        if isinstance(value, (*_PLAIN, partial, FunctionType))
    }
    return ", ".join(f"{key}={told[key]}" for key in told)


def _code(code: Any) -> str:
    """Return the instructions of a code object with the names and constants in them, functions inside too."""
    return f"{code.co_code.hex()} {code.co_names} {_constant(code.co_consts)}"


def _constant(value: Any) -> str:
    """Write a constant of code. The order of a set is another one in each process."""
    if isinstance(value, CodeType):
        return _code(value)
    if isinstance(value, frozenset):
        return f"{{{', '.join(sorted(map(_constant, value)))}}}"
    return f"({', '.join(map(_constant, value))})" if isinstance(value, tuple) else repr(value)
