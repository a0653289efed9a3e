"""Text in memory: rows of tokens, and for each token the one that follows it."""

import torch

from kway.data.arrays import InMemory, Rows
from kway.data.order import Indices
from kway.errors import DataError

Tensor = torch.Tensor
Batch = tuple[Tensor, Tensor]


class Windows(InMemory):
    """A text cut into rows of ``length`` tokens, one after the other; what is left at the end is not used.

    ``tokens``: any integers, shape (n,), from 0 to ``classes`` - 1. Raises ``DataError`` for others, or fewer than
    ``length`` + 1.
    """

    def __init__(self, name: str, tokens: Tensor, length: int, classes: int) -> None:
        if tokens.is_floating_point() or tokens.is_complex() or tokens.ndim != 1:
            raise DataError(
                f"{name}: tokens of type {tokens.dtype}, shape {tuple(tokens.shape)}", "integers, 1-D"
            )
        if length < 1 or len(tokens) <= length:
            raise DataError(
                f"{name}: {len(tokens)} tokens in rows of {length}", "rows from 1, and a token more"
            )
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high >= classes:
            raise DataError(f"{name}: tokens from {low} to {high}", f"tokens from 0 to {classes - 1}")
        self.name = name
        # Each row holds the first token of the next one too, which follows its last.
        self.windows = tokens.unfold(0, length + 1, length).contiguous()

    def __len__(self) -> int:
        return len(self.windows)

    def take(self, indices: Indices) -> Batch:
        """Return tokens and what follows each, int64, both of shape (n, length)."""
        return _pairs(self.windows[torch.from_numpy(indices)])

    def rows(self) -> Rows:
        """Return the rows as they are stored: small integers, that become int64 when a batch is made."""
        return Rows(self.windows, _pairs)


def _pairs(rows: Tensor) -> Batch:
    numbers = rows.to(torch.int64)
    return numbers[:, :-1].contiguous(), numbers[:, 1:].contiguous()
