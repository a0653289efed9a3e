"""Data sets by name. A file in ``kway/data/sets`` is found by its name, with ``-`` for ``_``."""

from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from kway.registry import modules_of, unknown

if TYPE_CHECKING:
    from kway.data.arrays import InMemory

DEFAULT_SOURCE = "synthetic"
_SETS = "kway.data.sets"


@dataclass(frozen=True)
class Source:
    """A named data set. ``shape``: that of a sample, (C, H, W) of an image or (T,) of a row of tokens; ``classes``:
    number of labels, or of different tokens; ``notices``: for the user.
    """

    name: str
    train: "InMemory"
    validation: "InMemory"
    shape: tuple[int, ...]
    classes: int
    notices: list[str] = field(default_factory=list)


def names() -> list[str]:
    """List the names of all data sets. Does not import torch."""
    return [name.replace("_", "-") for name in modules_of(_SETS)]


def load(name: str, data_dir: Path | None = None, seed: int = 0) -> Source:
    """Read a data set.

    ``data_dir`` is the root with one folder a set, for sets that are read from files; nothing is downloaded
    here (``kway.data.fetching``). ``seed`` decides sets that are drawn. Raises ``UsageError`` for an unknown name or a
    package that is not installed, and ``DataError`` for files that are missing, truncated or wrong.
    """
    if name not in names():
        raise unknown("data set", name, names())
    source: Source = import_module(module_of(name)).load(data_dir, seed)
    return source


def module_of(name: str) -> str:
    """Return the module of a data set."""
    return f"{_SETS}.{name.replace('-', '_')}"
