"""IDX files, the format of MNIST and its relatives: big-endian sizes, then bytes; gzip or plain."""

import gzip
import hashlib
import zlib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from kway.data.folders import no_images, set_folder
from kway.data.images import Images
from kway.data.sources import Source
from kway.errors import DataError

_UINT8 = 0x08
_CLASSES = 10
_FILES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "validation": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}


def load_folder(name: str, data_dir: Path | None, checksums: Mapping[str, str]) -> Source:
    """Read the four files of data set ``name`` from ``data_dir``/``name``.

    ``checksums``: SHA-256 of the decompressed content by file name; a file that is not named is not checked.
    Raises ``DataError`` naming the file that is missing, empty, truncated or wrong.
    """
    folder = set_folder(name, data_dir, "the four IDX files")
    # All four are found before the first is read: a missing one is told at once.
    files = {
        part: (_find(folder, images), _find(folder, labels)) for part, (images, labels) in _FILES.items()
    }
    for path in (path for pair in files.values() for path in pair):
        if not path.stat().st_size:
            raise no_images(name, folder, path)
    parts = {
        part: _read_pair(images, labels, checksums, partial(no_images, name, folder))
        for part, (images, labels) in files.items()
    }
    shapes = {part: tuple(images.images.shape[1:]) for part, images in parts.items()}
    if shapes["train"] != shapes["validation"]:
        raise DataError(
            f"{folder}: images of shape {shapes['train']} and {shapes['validation']}", "one shape"
        )
    channels, height, width = shapes["train"]
    return Source(name, parts["train"], parts["validation"], (channels, height, width), _CLASSES)


def _find(folder: Path, name: str) -> Path:
    for path in (folder / f"{name}.gz", folder / name):
        if path.is_file():
            return path
    raise DataError(
        f"no file {folder / name}.gz", "it is part of the data set", "put it there (.gz or unpacked)"
    )


def _read_pair(
    image_file: Path, label_file: Path, checksums: Mapping[str, str], empty: Callable[[Path], DataError]
) -> Images:
    images = read(image_file, 3, checksums.get(image_file.name.removesuffix(".gz")))
    labels = read(label_file, 1, checksums.get(label_file.name.removesuffix(".gz")))
    for path, values in ((image_file, images), (label_file, labels)):
        if not len(values):
            raise empty(path)
    if len(images) != len(labels):
        raise DataError(
            f"{label_file}: {len(labels)} labels", f"{len(images)}, as many as {image_file.name} has"
        )
    return Images(
        str(label_file),
        torch.from_numpy(images).unsqueeze(1),
        torch.from_numpy(labels.astype(np.int64)),
        _CLASSES,
    )


def read(path: Path, dimensions: int, sha256: str | None = None) -> npt.NDArray[np.uint8]:
    """Return the uint8 array that an IDX file holds. Raises ``DataError`` naming the file and what is wrong."""
    content = _content(path)
    magic, expected = content[:4], bytes([0, 0, _UINT8, dimensions])
    start = 4 + 4 * dimensions
    if magic != expected:
        raise DataError(
            f"{path} starts with {magic.hex() or 'nothing'}",
            f"{expected.hex()}, an IDX file of bytes with {dimensions} dimensions",
        )
    if len(content) < start:
        raise DataError(f"{path} holds {len(content)} bytes", f"a header of {start}")
    shape = tuple(int(size) for size in np.frombuffer(content, ">u4", dimensions, 4))
    need = start + int(np.prod(shape, dtype=object))
    if len(content) != need:
        raise DataError(f"{path} holds {len(content)} bytes", f"{need}, for the shape {shape} that it names")
    if sha256 is not None:
        found = hashlib.sha256(content).hexdigest()
        if found != sha256:
            raise DataError(f"{path} has content of SHA-256 {found}", sha256, "get the file again")
    # A copy: an array over bytes could not be written to, and torch warns of such.
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape).copy()


def _content(path: Path) -> bytes:
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            return file.read()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {error}", "a whole file", "get the file again") from None
