"""The files of CIFAR-10, in both forms that its authors publish for programs: bytes, and pickles of Python 2.

A row of the binary form is a label, 1 byte, and 3,072 bytes of pixels: 32 x 32 of red, then green, then blue, line by
line. A pickle holds the same pixels as an array of shape (N, 3072) under ``data``, and labels as a list under
``labels`` (https://www.cs.toronto.edu/~kriz/cifar.html).
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kway.data import plain_pickle
from kway.data.folders import no_images, set_folder
from kway.data.images import Images
from kway.data.sources import Source
from kway.errors import DataError

_CHANNELS, _SIDE, _CLASSES = 3, 32, 10
_PIXELS = _CHANNELS * _SIDE * _SIDE
_TRAIN = tuple(f"data_batch_{number}" for number in range(1, 6))
_TEST = "test_batch"

Rows = tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]


def load_folder(name: str, data_dir: Path | None) -> Source:
    """Read the six files in ``data_dir``/``name``, or in the folder in it that the archive unpacks to.

    Any number of images in each, but not none. Raises ``DataError`` naming the file that is missing, empty, truncated
    or wrong.
    """
    root = set_folder(name, data_dir, "the six files")
    folder, suffix, read = _form(root)
    paths = {stem: folder / f"{stem}{suffix}" for stem in (*_TRAIN, _TEST)}
    for path in paths.values():
        if not path.is_file():
            raise DataError(f"no file {path}", "it is part of the data set", "put it there")
    for path in paths.values():
        if not path.stat().st_size:
            raise no_images(name, root, path)
    train, held = (_images([paths[stem] for stem in stems], read, name, root) for stems in (_TRAIN, (_TEST,)))
    return Source(name, train, held, (_CHANNELS, _SIDE, _SIDE), _CLASSES)


def _form(root: Path) -> tuple[Path, str, Callable[[Path], Rows]]:
    """Return where the files lie, how their names end, and what reads them."""
    forms: tuple[tuple[str, str, Callable[[Path], Rows]], ...] = (
        (".bin", "cifar-10-batches-bin", read_binary),
        ("", "cifar-10-batches-py", read_pickle),
    )
    for suffix, inside, read in forms:
        for folder in (root, root / inside):
            if any((folder / f"{stem}{suffix}").is_file() for stem in (*_TRAIN, _TEST)):
                return folder, suffix, read
    raise DataError(
        f"none of the files of CIFAR-10 in {root}",
        f"{_TRAIN[0]}.bin to {_TRAIN[-1]}.bin and {_TEST}.bin, or the pickles without .bin",
        "put them there, or remove the folder and call kway data fetch cifar10",
    )


def _images(paths: list[Path], read: Callable[[Path], Rows], name: str, root: Path) -> Images:
    found = []
    for path in paths:
        pixels, labels = read(path)
        if not len(labels):
            raise no_images(name, root, path)
        if not (labels.min() >= 0 and labels.max() < _CLASSES):
            raise DataError(
                f"{path}: labels from {labels.min()} to {labels.max()}", f"labels from 0 to {_CLASSES - 1}"
            )
        found.append((pixels, labels))
    images, all_labels = (np.concatenate(part) for part in zip(*found, strict=True))
    shape = (-1, _CHANNELS, _SIDE, _SIDE)
    return Images(name, torch.from_numpy(images).view(shape), torch.from_numpy(all_labels), _CLASSES)


def read_binary(path: Path) -> Rows:
    """Return pixels, uint8 of shape (N, 3072), and labels, int64 of shape (N,), of a file of the binary form."""
    try:
        content = np.fromfile(path, np.uint8)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}", "a whole file", "get the file again") from None
    if len(content) % (1 + _PIXELS):
        raise DataError(
            f"{path} holds {len(content)} bytes",
            f"rows of {1 + _PIXELS}: a label and its image",
            "get it again",
        )
    rows = content.reshape(-1, 1 + _PIXELS)
    return rows[:, 1:], rows[:, 0].astype(np.int64)


def read_pickle(path: Path) -> Rows:
    """Return pixels, uint8 of shape (N, 3072), and labels, int64 of shape (N,), of a file of the Python form.

    Nothing that the pickle names is imported or called: see ``kway.data.plain_pickle``.
    """
    found = plain_pickle.read(path)
    pixels, labels = _entry(path, found, "data"), _entry(path, found, "labels")
    pixels = pixels.array if isinstance(pixels, plain_pickle.Held) else None
    if pixels is None or pixels.dtype != np.uint8 or pixels.ndim != 2 or pixels.shape[1] != _PIXELS:
        got = "none" if pixels is None else f"of type {pixels.dtype}, shape {pixels.shape}"
        raise DataError(f"{path}: an array 'data' that is {got}", f"uint8 of shape (N, {_PIXELS})")
    if not isinstance(labels, list) or not all(type(label) is int for label in labels):
        raise DataError(f"{path}: 'labels' is of type {type(labels).__name__}", "a list of whole numbers")
    if len(labels) != len(pixels):
        raise DataError(f"{path}: {len(labels)} labels", f"{len(pixels)}, as many as there are images")
    if any(not 0 <= label < _CLASSES for label in labels):
        raise DataError(
            f"{path}: labels from {min(labels)} to {max(labels)}", f"labels from 0 to {_CLASSES - 1}"
        )
    return pixels, np.array(labels, np.int64)


def _entry(path: Path, found: Any, name: str) -> Any:
    # Python 2 wrote its texts as bytes.
    for key in (name.encode(), name):
        if isinstance(found, dict) and key in found:
            return found[key]
    raise DataError(f"{path} has no {name!r}", "a dict with 'data' and 'labels'", "get the file again")
