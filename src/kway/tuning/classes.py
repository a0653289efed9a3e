"""What a class holds that tells it from others, and which attributes of its objects are no more than their state."""

from collections.abc import Iterator
from functools import cached_property, partialmethod
from types import FunctionType
from typing import Any

from kway.tuning.bytecode import names_in, stored_names
from kway.tuning.libraries import is_library

_AROUND = (staticmethod, classmethod, property, cached_property, partialmethod)
# What makes an object. What these methods store is what it is, what others store is how far it got.
_MAKE = ("__new__", "__init__", "__post_init__")


def members(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what a class holds under a name: code, also what properties and the like have inside, and plain values."""
    if isinstance(value, _AROUND):
        inside = [getattr(value, each, None) for each in ("__func__", "fget", "fset", "func")]
        yield from ((name, each) for each in inside if each is not None)
    elif isinstance(value, FunctionType) or not name.startswith("__"):
        yield name, value


def state_names(kind: type) -> set[str]:
    """Return the names of the attributes that methods store which do not make an object."""
    codes: dict[str, list[Any]] = {}
    for each in kind.__mro__:
        if not is_library(each.__module__):
            for key, value in vars(each).items():
                found = [
                    member.__code__ for _, member in members(key, value) if isinstance(member, FunctionType)
                ]
                codes.setdefault(key, []).extend(found)
    making, waiting = set(_MAKE), list(_MAKE)
    while waiting:
        for code in codes.get(waiting.pop(), ()):
            called = names_in(code) & codes.keys() - making
            making |= called
            waiting += called
    return {name for key in codes.keys() - making for code in codes[key] for name in stored_names(code)}
