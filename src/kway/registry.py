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
    close = get_close_matches(name, names, n=1, cutoff=_CLOSE)
    advice = f"did you mean {close[0]!r}?" if close else ""
    if name in announced:
        advice = f"{name!r} is announced, but not there yet"
    listed = ", ".join(names) + (f", or {also}" if also else "")
    return UsageError(f"unknown {kind} {name!r}", f"known are {listed}", advice)


def modules_of(package: str) -> list[str]:
    """List the modules of a package by name: a file that is put there is found without being registered."""
    return sorted(found.name for found in iter_modules(import_module(package).__path__))
