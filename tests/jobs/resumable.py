"""A small job with all that a run which goes on can lose: dropout, running statistics, buffers, figures."""

from functools import partial
from typing import Any

import torch
from torch import nn

import kway

__kway_by_value__ = True

EPOCHS = 3
TRAINED = {"epochs": EPOCHS, "save_best": "accuracy", "early_stop": "validation_loss", "patience": 50}


class Net(nn.Module):
    """Dropout, running statistics, and a buffer that is in no weights file but counts steps all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(12, 16), nn.BatchNorm1d(16), nn.Dropout(0.2)
        self.last = nn.Linear(16, 3)
        self.register_buffer("seen", torch.zeros(()), persistent=False)

    def forward(self, x: torch.Tensor) -> Any:
        if self.training:
            self.seen += 1
        return self.last(self.drop(self.norm(self.first(x)).relu())) * (1 + self.seen / 100)


def job(x: torch.Tensor, y: torch.Tensor, **more: Any) -> kway.Job:
    """The job on these samples, the first 30 held out."""
    given = {
        "model": Net,
        "loss": nn.CrossEntropyLoss(),
        "optimizer": partial(torch.optim.Adam, lr=0.01),
        "data": (x, y),
        "validation": (x[:30], y[:30]),
        "batch_size": 24,
        "metrics": {"accuracy": kway.accuracy},
        **more,
    }
    return kway.Job(**given)
