"""Plain values of attributes on their way to another rank, which may not be able to import the classes of enums."""

from enum import Enum, Flag
from typing import Any, NamedTuple

import numpy as np

from kway.step.alike import PLAIN
from kway.step.plain_attributes import GONE


class OfEnum(NamedTuple):
    """One of an enum by the names of both, of a ``Flag`` by its number: what lies in it may be anything."""

    kind: str
    member: str | int


def can_be_sent(value: Any, before: Any) -> bool:
    """Whether another rank, where ``before`` was the same, can have this value too."""
    kind = type(value)
    if isinstance(value, Enum):
        return kind is type(before)
    if isinstance(value, np.generic):
        return kind is value.dtype.type and not value.dtype.hasobject
    return kind in PLAIN or value is GONE


def sent(value: Any) -> Any:
    """Return what can be pickled and says what ``value`` does, which ``can_be_sent``."""
    if not isinstance(value, Enum):
        return value
    return OfEnum(type(value).__qualname__, int(value._value_) if isinstance(value, Flag) else value._name_)


def received(value: Any, before: Any) -> Any:
    """Return what was ``sent`` to where ``before`` is; an ``OfEnum`` as it is where this rank does not know that."""
    kind = type(before)
    if not isinstance(value, OfEnum) or not issubclass(kind, Enum) or kind.__qualname__ != value.kind:
        return value
    if issubclass(kind, Flag):
        return kind(value.member)
    return kind.__members__.get(str(value.member), value)
