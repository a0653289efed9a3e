"""A loss module that hooks and functions of the model write into: they know no copy of it."""

import copy
import dis
from collections.abc import Iterable, Iterator
from enum import Enum
from logging import Logger
from types import CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from kway.launch.parameter_hooks import hooks_on
from kway.step.copying import apart
from kway.step.holders import is_the_users
from kway.step.reach import CODE, CONTAINERS, codes_in, ends, reached, walked

# What nothing is written into for a loss to read, or what a copy of the loss shares.
_LEFT = (torch.Tensor, np.ndarray, ModuleType, Dataset, DataLoader, Enum, Logger, *CODE)
# Beside these, what is called like the methods of containers that write.
_WRITE = ("STORE_SUBSCR", "DELETE_SUBSCR", "STORE_SLICE")
_WRITERS = frozenset(
    name
    for kind in CONTAINERS
    for name in vars(kind)
    if name[:2] != "__" and name not in ("copy", "count", "get", "index", "items", "keys", "values")
)
_OF_TORCH = frozenset(vars(nn.Module()))


def loss_beside(model: nn.Module, loss: Any) -> Any:
    """Return what a run that trains this very ``model`` calls as its loss: of a module a copy.

    One that hooks of the model write into (``knows``) is returned as it is, and so is what is no module.
    """
    if not isinstance(loss, nn.Module) or knows(model, loss):
        return loss
    return copy.deepcopy(loss, apart(loss))


def knows(model: nn.Module, loss: nn.Module) -> bool:
    """Whether ``model`` leads to a place where ``loss`` finds what is written there in a forward or backward pass.

    Such a place is the loss, a module inside of it, and every container and object that they hold: all of them for
    hooks of the model and functions in its attributes. Of what lies in attributes alone the loss and its modules count,
    and their containers where methods of the model may write into some; both may read one. What is a part of the model
    as well, data and tensors do not count.
    """
    if all(_is_of_torch(module) for module in loss.modules()):
        return False
    own = {id(module) for module in model.modules()}
    modules = [module for module in loss.modules() if id(module) not in own]
    held = [value for module in modules for name, value in vars(module).items() if name not in _OF_TORCH]
    parts = {id(module) for module in modules}
    inside = {
        id(each)
        for each in walked(held, lambda value: _is_left(value) or id(value) in own)
        if _is_place(each) and id(each) not in own
    }
    if any(id(each) in parts or id(each) in inside for each in reached(_functions(model))):
        return True
    there = [*reached([model])]
    if any(id(each) in parts for each in there):
        return True
    containers = {id(each) for each in walked(held, _is_no_container) if issubclass(type(each), CONTAINERS)}
    return any(id(each) in containers for each in there) and _may_write(there)


def _is_of_torch(module: nn.Module) -> bool:
    """Whether ``module`` reads nothing but its own tensors and options, which are followed where they change."""
    hooked = any(table for name, table in vars(module).items() if name.endswith("_hooks"))
    return type(module).__module__.startswith("torch.nn.") and not hooked


def _functions(model: nn.Module) -> Iterator[Any]:
    """Yield what a pass of ``model`` calls that is no method: hooks, and functions that its modules hold."""
    for module in model.modules():
        for name, table in vars(module).items():
            if name.endswith("_hooks") and isinstance(table, dict):
                yield from table.values()
    for parameter in model.parameters():
        for table in hooks_on(parameter):
            yield from (table or {}).values()
    yield from (each for each in walked([model], ends) if issubclass(type(each), CODE))


def _is_left(value: Any) -> bool:
    return issubclass(type(value), _LEFT)


def _is_place(value: Any) -> bool:
    kind = type(value)
    return kind is not object and not issubclass(kind, (*_LEFT, tuple, frozenset))


def _is_no_container(value: Any) -> bool:
    return not issubclass(type(value), (*CONTAINERS, tuple, frozenset))


def _may_write(values: Iterable[Any]) -> bool:
    """Whether methods of ``values``, or what these reach, may write into a container.

    So does what calls functions of a module of the user's, which are not looked at.
    """
    kinds = {base: None for value in values for base in type(value).__mro__ if is_the_users(base.__module__)}
    # A step makes no layers.
    methods = [each for kind in kinds for name, each in vars(kind).items() if name != "__init__"]
    for each in reached(methods):
        if type(each) is ModuleType and is_the_users(each.__name__):
            return True
        if (
            type(each) is FunctionType
            and is_the_users(each.__module__)
            and any(map(_writes, codes_in(each.__code__)))
        ):
            return True
    return False


def _writes(code: CodeType) -> bool:
    """Whether ``code`` may write into a container: ``+=`` does so into a list."""
    return not _WRITERS.isdisjoint(code.co_names) or any(
        step.opname in _WRITE or (step.opname == "BINARY_OP" and step.argrepr.endswith("="))
        for step in dis.get_instructions(code)
    )
