"""Layers that communicate in backward, where the loss of some rank does not reach them: those of one device."""

from functools import partial

import pytest
import torch
from torch import nn

import kway

X = torch.randn(20, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
RARE, NEVER = (torch.arange(20) >= 18).long(), torch.zeros(20, dtype=torch.int64)
# A zero in place of no gradient would move a parameter by momentum and decay.
SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.1)


class Heads(nn.Module):
    """Two heads, each behind batch normalisation, and a third that no loss looks at."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(3, 4)
        self.usual = nn.BatchNorm1d(4)
        self.rare = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
        self.idle = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4))

    def forward(self, x):
        hidden = self.trunk(x)
        return self.usual(hidden), self.rare(hidden), self.idle(hidden)


def routed(output, target):
    rare = target > 0
    total = (output[0] - 1).square()[~rare].sum()
    if rare.any():
        total = total + (output[1] - 1).square()[rare].sum()
    return total, len(target)


def gathered(output, target):
    """The same, and samples of a kind are compared with those of all devices."""
    total, weight = routed(output, target)
    rows = kway.all_samples(output[1])
    if (target > 0).any():
        total = total + (output[1][target > 0] * rows.mean(0)).sum()
    return total, weight


def plain(loss, target, batch_size):
    """One epoch of whole batches in plain torch."""
    torch.manual_seed(0)
    model = Heads().double()
    optimizer = SGD(model.parameters())
    for rows in torch.arange(len(X)).split(batch_size):
        output = model(X[rows])
        total, weight = routed(output, target[rows])
        rare = target[rows] > 0
        if loss is gathered and rare.any():
            total = total + (output[1][rare] * output[1].mean(0)).sum()
        model.zero_grad()
        (total / weight).backward()
        optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("batch_size", [4, 18])  # the last batch of 18 is two samples: one rank has none
@pytest.mark.parametrize("target", [RARE, NEVER], ids=["one rank", "none"])
@pytest.mark.parametrize("loss", [routed, gathered])
def test_a_layer_that_a_ranks_loss_does_not_reach_meets_the_others(ranks, loss, target, batch_size, size):
    job = kway.Job(
        model=Heads, loss=loss, optimizer=SGD, data=(X, target), batch_size=batch_size, precision="fp64",
        shuffle=False,
    )  # fmt: skip
    own = kway.train(job, devices=f"cpu:{size}", strategy="data", epochs=1, ranks=ranks, echo=False).model
    for name, value in plain(loss, target, batch_size).items():
        torch.testing.assert_close(own.state_dict()[name], value, rtol=0, atol=1e-12, msg=name)
