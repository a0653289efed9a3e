"""Which part of an object cannot travel: the path to it, for an error that a user can act on."""

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kway.errors import UsageError
from kway.launch.payload import check, dump
from kway.launch.temporary import NoRoomError

_DEEPEST = 12
_UNNAMED = "argument "


def dump_call(function: Callable[..., Any], arguments: tuple[Any, ...], folder: Path) -> bytes:
    """Pickle a task. Raises ``UsageError`` that names the path to the object which cannot be sent.

    That there is no room for it is nobody's fault in the task: ``NoRoomError`` goes through.
    """
    try:
        return dump((function, arguments), folder)
    except NoRoomError:
        raise
    except Exception as error:
        raise _refusal(function, arguments, error) from error


def _refusal(function: Callable[..., Any], arguments: tuple[Any, ...], error: Exception) -> UsageError:
    named = zip(_parameters(function, len(arguments)), arguments, strict=True)
    return _first_refusal([(_name_of(function), function), *named], error)


def check_value(name: str, value: Any) -> None:
    """Raise ``UsageError`` as ``dump_value`` does, where one object cannot be sent; nothing is written."""
    try:
        check(value)
    except Exception as error:
        raise _first_refusal([(name, value)], error) from error


def dump_value(name: str, value: Any, folder: Path | None = None) -> bytes:
    """Pickle one object that the user knows as ``name``. Raises ``UsageError`` as ``dump_call`` does."""
    try:
        return dump(value, folder)
    except NoRoomError:
        raise
    except Exception as error:
        raise _first_refusal([(name, value)], error) from error


def _first_refusal(parts: list[tuple[str, Any]], error: Exception) -> UsageError:
    for name, part in parts:
        if not _travels(part):
            path, found = _deepest(name, part)
            if name.startswith(_UNNAMED):
                # A number says nothing to the user, who knows the parts by their names.
                path = path.removeprefix(f"{name}.")
            kind = f"{type(found).__module__}.{type(found).__qualname__}".removeprefix("builtins.")
            return UsageError(
                f"{path}: a {kind!r} cannot be sent to other processes",
                str(error).strip().partition("\n")[0],
                "make it where it is used, or give its class a __getstate__ that leaves it out",
            )
    return UsageError(f"{parts[0][0]} cannot be sent to other processes", str(error))


def _name_of(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", type(function).__qualname__)


def _parameters(function: Callable[..., Any], count: int) -> list[str]:
    """Name the arguments after the context as the function does, or by number."""
    try:
        names = [
            parameter.name
            for parameter in inspect.signature(function).parameters.values()
            if parameter.kind in {parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD}
        ][1:]
    except (TypeError, ValueError):
        names = []
    return [names[i] if i < len(names) else f"{_UNNAMED}{i + 1}" for i in range(count)]


def _travels(value: Any) -> bool:
    try:
        dump(value)
    except Exception:
        return False
    return True


def _deepest(path: str, value: Any) -> tuple[str, Any]:
    """Follow the parts that fail, down to one whose own parts are all fine."""
    for _ in range(_DEEPEST):
        failing = next(((step, part) for step, part in _parts(value) if not _travels(part)), None)
        if failing is None:
            break
        path, value = path + failing[0], failing[1]
    return path, value


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, part in value.items():
            yield f"[{key!r}]", part
    elif isinstance(value, list | tuple | set | frozenset):
        for index, part in enumerate(value):
            yield f"[{index}]", part
    elif inspect.ismethod(value):
        yield ".__self__", value.__self__
    elif inspect.isfunction(value):
        free = inspect.getclosurevars(value)
        for name, part in {**free.nonlocals, **free.globals}.items():
            yield f".{name}", part
        for index, part in enumerate(value.__defaults__ or ()):
            yield f".__defaults__[{index}]", part
    elif not inspect.isclass(value) and not inspect.ismodule(value):
        yield from _attributes(value)


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    for name in ("func", "args", "keywords"):  # functools.partial keeps these outside of its __dict__
        if type(value).__name__ == "partial" and hasattr(value, name):
            yield f".{name}", getattr(value, name)
    for name, part in getattr(value, "__dict__", {}).items():
        if name in {"_modules", "_parameters", "_buffers"} and isinstance(part, dict):
            for inner, tensor in part.items():
                yield f".{inner}", tensor
        else:
            yield f".{name}", part
    for slot in getattr(type(value), "__slots__", ()):
        if isinstance(slot, str) and hasattr(value, slot):
            yield f".{slot}", getattr(value, slot)
