"""How what a user wrote reaches another process: by value, where that process cannot import it."""

import sys
from collections.abc import Iterator
from importlib import import_module
from io import TextIOWrapper
from pickle import PicklingError
from types import CodeType, FunctionType, ModuleType
from typing import Any, TypeVar

import cloudpickle


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles lambdas, classes of ``__main__``, and what was defined in a file that kway loaded by its path."""

    def reducer_override(self, obj: Any) -> Any:
        """Say how to make ``obj`` again; see ``pickle.Pickler``."""
        if isinstance(obj, CodeType):
            return self._code(obj)
        if isinstance(obj, TextIOWrapper) and obj not in (sys.stdout, sys.stderr):
            # cloudpickle would read the file, and send what it read for a file.
            raise PicklingError("an open file")
        if isinstance(obj, ModuleType):
            found = _odd_module(obj)
            if found is not None:
                return found
            _mark_by_value(obj.__name__)
        elif isinstance(obj, FunctionType | type | TypeVar):
            _mark_by_value(getattr(obj, "__module__", None))
        return super().reducer_override(obj)

    def _code(self, code: CodeType) -> tuple[Any, ...]:
        # cloudpickle leaves the file's name out; tracebacks from other processes need it to show the user's lines.
        make, arguments = self.dispatch_table[CodeType](code)
        return make, tuple(code.co_filename if part == "<dynamic-code>" else part for part in arguments)


def _mark_by_value(name: Any) -> None:
    """Tell cloudpickle of the module ``name`` and those above it which no other process can import.

    They are those that kway loaded from a file. Where what is pickled has no name of a module, cloudpickle looks for it
    in all modules, and is told of all. To do that each time would take longer than to pickle a number does.
    """
    known = cloudpickle.list_registry_pickle_by_value()
    for each in _and_above(name) if isinstance(name, str) else list(sys.modules):
        module = sys.modules.get(each)
        # Some put other things than modules there, which may answer to any name.
        if isinstance(module, ModuleType) and _is_marked(module) and module.__name__ not in known:
            cloudpickle.register_pickle_by_value(module)


def _and_above(name: str) -> Iterator[str]:
    while name:
        yield name
        name = name.rpartition(".")[0]


def _is_marked(module: ModuleType) -> bool:
    # Not by getattr: a module that is imported when it is first used would be, to be asked for this.
    return ModuleType.__getattribute__(module, "__dict__").get("__kway_by_value__", False) is True


def _odd_module(module: ModuleType) -> tuple[Any, ...] | None:
    """Return how another process gets a module of a class of its own, as pickle wants it: (function, arguments).

    cloudpickle sends plain modules by itself, but not ``torch.backends.cudnn``, say. ``None`` for a plain module,
    and where the name does not lead to the module.
    """
    if type(module) is ModuleType:
        return None
    name = str(module.__name__)
    if _is_marked(module):
        raise PicklingError(f"module {name!r}, loaded from a file, has a class of its own")
    if sys.modules.get(name) is module:
        return import_module, (name,)
    parent, _, leaf = name.rpartition(".")
    outer = sys.modules.get(parent)
    return (getattr, (outer, leaf)) if outer is not None and getattr(outer, leaf, None) is module else None
