"""Images and labels in memory."""

import torch

from kway.data.arrays import InMemory, Rows
from kway.data.order import Indices
from kway.errors import DataError

Batch = tuple[torch.Tensor, torch.Tensor]


class Images(InMemory):
    """``images``: uint8, shape (N, C, H, W); ``labels``: int64, shape (N,), from 0 to ``classes`` - 1.

    Pixels become float32 from 0 to 1 when a batch is taken: memory, and what travels to ranks, stay a quarter
    as large. ``name`` stands in errors and records. Raises ``DataError`` for other shapes or types, or another label.
    """

    def __init__(self, name: str, images: torch.Tensor, labels: torch.Tensor, classes: int) -> None:
        if images.dtype != torch.uint8 or images.ndim != 4:
            raise DataError(
                f"{name}: images of type {images.dtype}, shape {tuple(images.shape)}", "uint8, 4-D"
            )
        if labels.dtype != torch.int64 or labels.shape != images.shape[:1]:
            raise DataError(
                f"{name}: labels of type {labels.dtype}, shape {tuple(labels.shape)}",
                f"int64, one for each of the {len(images)} images",
            )
        if not len(images):
            raise DataError(f"{name}: 0 images", "at least 1")
        low, high = int(labels.min()), int(labels.max())
        if low < 0 or high >= classes:
            raise DataError(f"{name}: labels from {low} to {high}", f"labels from 0 to {classes - 1}")
        self.name, self.images, self.labels = name, images, labels

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, indices: Indices) -> Batch:
        """Return pixels, float32 from 0 to 1, shape (n, C, H, W), and labels, int64, shape (n,)."""
        rows = torch.from_numpy(indices)
        return _scaled((self.images[rows], self.labels[rows]))

    def rows(self) -> Rows:
        """Return images and labels as they are stored: pixels become numbers when a batch is made."""
        return Rows((self.images, self.labels), _scaled)


def _scaled(rows: Batch) -> Batch:
    pixels, labels = rows
    # Divided by a tensor: by a number, CUDA multiplies with its reciprocal, which differs in the last bit.
    whole = torch.full((), 255.0, dtype=torch.float32, device=pixels.device)
    return pixels.to(torch.float32).div_(whole), labels
