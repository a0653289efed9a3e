"""Names to things: one lookup for everything that users choose by name."""

from collections.abc import Collection, Iterable, Mapping
from difflib import get_close_matches
from importlib import import_module
from pkgutil import iter_modules
from typing import TypeVar

from kway.errors import UsageError
from kway.refused import reason

T = TypeVar("T")
# How alike two names must be, of 1, for one to be taken for the other misspelt: at less, "plan" is like "launch".
_CLOSE = 0.66


def known(kind: str, name: str, table: Mapping[str, T], also: str = "") -> T:
    """Return ``table[name]``, or raise the ``UsageError`` of ``unknown``."""
    if isinstance(name, str) and name in table:
        return table[name]
    raise unknown(kind, str(name), table, also)


def unknown(
    kind: str, name: str, names: Iterable[str], also: str = "", announced: Collection[str] = ()
) -> UsageError:
    """Make the error for a name that is not known: why it is refused, or the closest known name where there is one.

    ``also``: a form that is no name, and that is taken as well. ``announced``: names of what is to come.
    """
    if (why := reason(kind, name)) is not None:
        return UsageError(f"{kind} {name!r}", *why)
    names = sorted(names)
    close = closest(name, names, _CLOSE)
    advice = f"did you mean {close!r}?" if close is not None else ""
    if name in announced:
        advice = f"{name!r} is announced, but not there yet"
    listed = ", ".join(names) + (f", or {also}" if also else "")
    return UsageError(f"unknown {kind} {name!r}", f"known are {listed}", advice)


def closest(name: str, names: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the one of ``names`` that is most like ``name``; one that differs in case only before all others.

    ``None`` where none is alike enough: ``cutoff``, of 1.
    """
    by_lower = {each.lower(): each for each in sorted(names, reverse=True)}
    found = get_close_matches(name.lower(), by_lower, n=1, cutoff=cutoff)
    return by_lower[found[0]] if found else None


def modules_of(package: str) -> list[str]:
    """List the modules of a package by name: a file that is put there is found without being registered."""
    return sorted(found.name for found in iter_modules(import_module(package).__path__))
