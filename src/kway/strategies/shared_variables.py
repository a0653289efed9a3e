"""Variables by which hooks hand something to a forward pass, where a process has them once for all replicas."""

import dis
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

from torch import nn

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_LOADS = {"LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF"}
_ATTRIBUTES = {"LOAD_ATTR", "LOAD_METHOD"}
# Methods of containers that write, and return nothing of what was there.
_WRITES = {"__setitem__", "add", "append", "appendleft", "clear", "extend", "insert", "update"}


@dataclass
class _Use:
    """The variables that functions read and write: names by what is the same for all who know a variable."""

    read: dict[Any, str] = field(default_factory=dict)
    written: dict[Any, str] = field(default_factory=dict)


def shared_variable(model: nn.Module) -> str | None:
    """Say which variable a hook of ``model`` writes and a forward pass reads, of which a process has only one.

    That is a global one, or one of a function around the model's class. Found in the code of hooks, methods and
    functions in attributes, and of the functions that they call by a global name of the same file. ``None``: there is
    none.
    """
    hooks = [(name, hook) for name, module in model.named_modules() for hook in _hooks(module)]
    if not hooks:
        return None
    codes = {hook.__code__ for _, hook in hooks}
    modules = [*model.modules()]
    methods = {each for module in modules for each in _methods(module)}
    # What these close over each replica has for itself.
    held = {each for module in modules for each in vars(module).values() if isinstance(each, FunctionType)}
    read: dict[Any, str] = {}
    for functions, closed_over in ((methods, True), (held - methods, False)):
        for function in functions:
            if function.__code__ not in codes:
                read |= _used([function], closed_over).read
    for name, hook in hooks:
        for key, variable in _used([hook], True).written.items():
            if key in read:
                where = f"layer {name!r}" if name else "the model"
                return (
                    f"hook {hook.__qualname__} of {where} writes to the variable {variable!r}, which the forward pass "
                    "reads and all replicas in this process share; keep it in an attribute of the model, or use "
                    "strategy data"
                )
    return None


def _hooks(module: nn.Module) -> Iterator[FunctionType]:
    for table in _HOOKS:
        for hook in getattr(module, table, {}).values():
            called = hook
            while isinstance(called, partial):
                called = called.func
            if not isinstance(called, FunctionType | MethodType):
                called = vars(type(called)).get("__call__")
            if isinstance(called, MethodType):
                called = called.__func__
            if isinstance(called, FunctionType):
                yield called


def _methods(module: nn.Module) -> Iterator[FunctionType]:
    """Yield the methods of a module's class, but those that torch has."""
    for each in type(module).__mro__:
        if not f"{each.__module__}.".startswith(("torch.", "builtins.")):
            yield from (value for value in vars(each).values() if isinstance(value, FunctionType))


def _used(waiting: list[FunctionType], closed_over: bool) -> _Use:
    found, seen = _Use(), set[CodeType]()
    while waiting:
        function = waiting.pop()
        if function.__code__ in seen:
            continue
        seen.add(function.__code__)
        cells = (
            dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
            if closed_over
            else {}
        )
        names = function.__globals__
        codes = [function.__code__]
        while codes:
            code = codes.pop()
            codes += [each for each in code.co_consts if isinstance(each, CodeType)]
            _note(code, names, cells, found)
        called = (names.get(name) for name in function.__code__.co_names)
        waiting += [each for each in called if isinstance(each, FunctionType) and each.__globals__ is names]
    return found


def _note(code: CodeType, names: dict[str, Any], cells: dict[str, CellType], found: _Use) -> None:
    """Add the variables that ``code`` uses to ``found``."""
    steps = [*dis.get_instructions(code)]
    stores = any(step.opname in ("STORE_SUBSCR", "DELETE_SUBSCR") for step in steps)
    for step, after in zip(steps, [*steps[1:], None], strict=True):
        name = step.argval
        if step.opname == "STORE_GLOBAL":
            found.written[id(names), name] = name
        if step.opname not in _LOADS or after is None:
            continue
        is_cell = step.opname == "LOAD_DEREF"
        if name not in (cells if is_cell else names):
            continue
        key, value = (id(cells[name]), _held(cells[name])) if is_cell else ((id(names), name), names[name])
        takes = after.opname in _ATTRIBUTES
        if after.opname == "STORE_ATTR" or (_is_written_to(value) and takes and after.argval in _WRITES):
            found.written[key] = name
            continue
        if _is_written_to(value) and stores and not takes:
            found.written[key] = name
        found.read[key] = name


def _held(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it has no value yet
        return None


def _is_written_to(value: Any) -> bool:
    """Whether ``value`` is of a kind that is written to in place: a container, and what looks like one."""
    return isinstance(value, set) or hasattr(type(value), "__setitem__")
