"""Names to things: one lookup for everything that users choose by name."""

import sys
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType
from typing import Any, TypeVar

from kway.errors import UsageError

T = TypeVar("T")


def known(kind: str, name: str, table: Mapping[str, T], also: str = "") -> T:
    """Return ``table[name]``, or raise the ``UsageError`` of ``unknown``."""
    if isinstance(name, str) and name in table:
        return table[name]
    raise unknown(kind, str(name), table, also)


def unknown(kind: str, name: str, names: Iterable[str], also: str = "") -> UsageError:
    """Make the error for a name that is not known, with the closest known name where there is one.

    ``also``: a form that is no name, and that is taken as well.
    """
    names = sorted(names)
    close = get_close_matches(name, names, n=1)
    advice = f"did you mean {close[0]!r}?" if close else ""
    listed = ", ".join(names) + (f", or {also}" if also else "")
    return UsageError(f"unknown {kind} {name!r}", f"known are {listed}", advice)


def modules_of(package: str) -> list[str]:
    """List the modules of a package by name: a file that is put there is found without being registered."""
    return sorted(found.name for found in iter_modules(import_module(package).__path__))


def odd_module(module: ModuleType) -> tuple[Any, ...] | None:
    """Return how another process gets a module of a class of its own, as pickle wants it: (function, arguments).

    cloudpickle sends plain modules by itself, but not ``torch.backends.cudnn``, say. ``None`` for a plain module,
    and where the name does not lead to the module.
    """
    if type(module) is ModuleType:
        return None
    name = str(module.__name__)
    if sys.modules.get(name) is module:
        return import_module, (name,)
    parent, _, leaf = name.rpartition(".")
    outer = sys.modules.get(parent)
    return (getattr, (outer, leaf)) if outer is not None and getattr(outer, leaf, None) is module else None


def mark_by_value() -> None:
    """Tell cloudpickle which modules no other process can import: those that kway loaded from a file."""
    # Here, as commands that send nothing need not load it.
    import cloudpickle

    known = cloudpickle.list_registry_pickle_by_value()
    for module in list(sys.modules.values()):
        # Some put other things than modules there, which answer to any name.
        if not isinstance(module, ModuleType) or getattr(module, "__kway_by_value__", False) is not True:
            continue
        if module.__name__ not in known:
            cloudpickle.register_pickle_by_value(module)
