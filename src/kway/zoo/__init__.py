"""Example models, one file each: ``build(shape, classes)`` makes the module. Found by file name."""

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING

from kway.errors import UsageError
from kway.registry import modules_of, unknown

if TYPE_CHECKING:
    from torch import nn

Shape = tuple[int, int, int]


def names() -> list[str]:
    """List the names of all example models. Does not import torch."""
    return modules_of(__name__)


def get(name: str) -> "Callable[[Shape, int], nn.Module]":
    """Return the factory of a model: called with (channels, height, width) and the number of classes.

    Its weights are drawn from torch's global generator. Raises ``UsageError`` for an unknown name; the factory
    raises it for images or classes that the model cannot take.
    """
    if name not in names():
        raise unknown("model", name, names())
    build: Callable[[Shape, int], nn.Module] = import_module(f"{__name__}.{name}").build
    return build


def check(model: str, shape: Shape, classes: int) -> None:
    """Raise ``UsageError`` where a size of ``shape`` or the number of ``classes`` is below 1."""
    if len(shape) != 3 or min(shape) < 1:
        raise UsageError(
            f"{model} for samples of shape {tuple(shape)}", "(channels, height, width), each from 1"
        )
    if classes < 1:
        raise UsageError(f"{model} for {classes} classes", "at least 1")
