"""Losses that hold tensors: changed by a loop they are followed, changed by themselves they are refused."""

import pytest
import torch
from torch import nn

from kway.errors import RefusedError
from kway.step.losses import rule_for

CPU = torch.device("cpu")


class Ramped(nn.Module):
    """A loss that counts how often it is computed."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.tensor(0.0))

    def forward(self, output, target):
        self.calls += 1
        return (output - target) ** 2 * self.calls


def test_a_loss_that_changes_its_own_buffer_is_refused():
    rule = rule_for(Ramped(), CPU)
    with pytest.raises(RefusedError, match=r"Ramped changes its buffer 'calls'.*part of the model"):
        rule(torch.ones(2, 1), torch.zeros(2, 1), 2)


def test_a_loss_whose_buffer_the_loop_changes_is_followed():
    plain = Scaled()
    rule = rule_for(plain, CPU)
    totals = []
    for scale in (1.0, 3.0):
        plain.scale.fill_(scale)
        rule.changed()
        totals.append(float(rule(torch.ones(2, 1), torch.zeros(2, 1), 2)[0]))
    assert totals == [2.0, 6.0]


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.tensor(1.0))

    def forward(self, output, target):
        return (output - target) * self.scale
