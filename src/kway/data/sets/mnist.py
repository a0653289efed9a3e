"""MNIST, or any set of its format: IDX files of images with labels 0 to 9."""

from pathlib import Path

from kway.data.idx import load_folder
from kway.data.sources import Source


def load(data_dir: Path | None, seed: int) -> Source:
    """Read the four IDX files in ``data_dir``/mnist, with as many images as they name."""
    return load_folder("mnist", data_dir, {})
