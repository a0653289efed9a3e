"""Small sets in the form of CIFAR-10: classes that differ in colour, under noise."""

import pickle
from pathlib import Path

import numpy as np

STEMS = (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch")


def drawn(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return pixels, uint8 of shape (count, 3072), and labels."""
    draw = np.random.default_rng(seed)
    labels = np.arange(count) % 10
    colours = np.random.default_rng(99).integers(40, 216, (10, 3, 1))
    noise = draw.normal(0, 20, (count, 3, 1024))
    return np.clip(colours[labels] + noise, 0, 255).astype(np.uint8).reshape(count, 3072), labels


def binary(folder: Path, counts: tuple[int, ...] = (10, 10, 10, 10, 10, 20)) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for number, (stem, count) in enumerate(zip(STEMS, counts, strict=True)):
        pixels, labels = drawn(count, number)
        rows = np.concatenate([labels[:, None].astype(np.uint8), pixels], 1)
        (folder / f"{stem}.bin").write_bytes(rows.tobytes())
    return folder


def pickled(folder: Path, protocol: int = 2, counts: tuple[int, ...] = (10, 10, 10, 10, 10, 20)) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for number, (stem, count) in enumerate(zip(STEMS, counts, strict=True)):
        pixels, labels = drawn(count, number)
        held = {b"batch_label": stem.encode(), b"labels": labels.tolist(), b"data": pixels}
        (folder / stem).write_bytes(pickle.dumps(held, protocol))
    return folder
