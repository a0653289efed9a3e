"""Example models, one file each: ``build(shape, classes)`` makes the module. Found by file name.

A model that comes in several sizes is named with one of them after a dash, like ``gpt-10m``: its file has ``SIZES``.
"""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from kway.errors import UsageError
from kway.registry import modules_of, unknown

if TYPE_CHECKING:
    from torch import nn

Shape = tuple[int, ...]
# By the number of dimensions of a sample: what it is, and which data sets have such.
_SAMPLES = {
    3: ("(channels, height, width), each from 1", "images, like --data mnist5k"),
    1: ("(tokens,), from 1", "text, like --data text"),
}


def names() -> list[str]:
    """List the names of all example models, without their sizes. Does not import torch."""
    return modules_of(__name__)


def is_known(name: str) -> bool:
    """Whether there is a model of that name; of its size only that it is not empty. Does not import torch."""
    base, dash, size = name.partition("-")
    return base in names() and bool(size) == bool(dash)


def get(name: str) -> "Callable[[Shape, int], nn.Module]":
    """Return the factory of a model: called with the shape of a sample and the number of classes.

    Its weights are drawn from torch's global generator. Raises ``UsageError`` for an unknown name or size; the factory
    raises it for samples or classes that the model cannot take.
    """
    module = _module(name)
    base, _, size = name.partition("-")
    build: Callable[..., nn.Module] = module.build
    if not size:
        return build
    sizes = list(getattr(module, "SIZES", ()))
    if size in sizes:
        return partial(build, size=size)
    there = (
        f"there are {', '.join(f'{base}-{known}' for known in sizes)}" if sizes else f"{base} comes in one"
    )
    raise UsageError(f"model {base!r} in size {size!r}", there, f"{base} alone is the usual one")


def usual_data(name: str) -> str | None:
    """Return the data set that a model is trained on where none is named; ``None`` for any of images.

    Raises ``UsageError`` for an unknown name.
    """
    return getattr(_module(name), "DATA", None)


def check(model: str, shape: Shape, classes: int, dimensions: int = 3) -> None:
    """Raise ``UsageError`` where ``shape`` is not that of a sample of so many dimensions, or there is no class."""
    need, data = _SAMPLES[dimensions]
    if len(shape) != dimensions or min(shape) < 1:
        raise UsageError(f"{model} for samples of shape {tuple(shape)}", need, f"name a data set of {data}")
    if classes < 1:
        raise UsageError(f"{model} for {classes} classes", "at least 1")


def _module(name: str) -> Any:
    if not is_known(name):
        raise unknown("model", name, names())
    return import_module(f"{__name__}.{name.partition('-')[0]}")
