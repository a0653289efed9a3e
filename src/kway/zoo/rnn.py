"""A recurrent network over tokens: embedding, two layers of LSTM or GRU, scores."""

from typing import Any

import torch
from torch import nn

from kway.zoo import Shape, check

DATA = "text"
SIZES: dict[str, type[nn.LSTM | nn.GRU]] = {"lstm": nn.LSTM, "gru": nn.GRU}
_WIDTH, _LAYERS = 256, 2


class RNN(nn.Module):
    """Takes tokens, int64 of shape (N, T), and returns a score for each that may follow, shape (N, classes, T)."""

    def __init__(self, classes: int, cell: type[nn.LSTM | nn.GRU]) -> None:
        super().__init__()
        self.tokens = nn.Embedding(classes, _WIDTH)
        self.cells: Any = cell(_WIDTH, _WIDTH, _LAYERS, batch_first=True)
        self.output = nn.Linear(_WIDTH, classes)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Score what follows each position. Classes come second, as torch's losses want them."""
        states, _ = self.cells(self.tokens(tokens))
        return self.output(states).transpose(1, 2)  # type: ignore[no-any-return]


def build(shape: Shape, classes: int, size: str = "lstm") -> nn.Module:
    """Make a network for rows of tokens below ``classes``, of any length; ``size``: ``lstm`` or ``gru``."""
    check("rnn", shape, classes, dimensions=1)
    return RNN(classes, SIZES[size])
