"""At level bits the last bit counts, and equally wrong is not right."""

import os
from functools import partial

import pytest
import torch
from torch import nn

import kway

X = torch.randn(13, 3, generator=torch.Generator().manual_seed(0))
Y = torch.arange(13) % 4


def rank():
    return int(os.environ.get("RANK", "0"))


class Biased(nn.Module):
    """Adds one unit in the last place to one weight of another rank's output."""

    def __init__(self, when):
        super().__init__()
        self.net, self.when, self.passes = nn.Linear(3, 4), when, 0

    def forward(self, x):
        self.passes += 1
        y = self.net(x)
        return y * (1 + 2.0**-23) if rank() == 1 and self.passes > self.when else y


class Drops(nn.Module):
    """Draws a mask from a generator that knows its rank."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(3, 4)

    def forward(self, x):
        generator = torch.Generator().manual_seed(rank())
        return self.net(x) * torch.bernoulli(torch.full((4,), 0.5), generator=generator)


def share_mean(output, target):
    """Weighs every shard alike, whatever it holds: the same on any number of devices, and wrong."""
    return nn.functional.cross_entropy(output, target), 1.0


def proved(ranks, model, loss=None):
    job = kway.Job(
        model=model, loss=loss or nn.CrossEntropyLoss(), optimizer=partial(torch.optim.SGD, lr=0.1), data=(X, Y),
        batch_size=13,
    )  # fmt: skip
    return kway.prove(job, devices="1,2", exactness="bits", shards=4, ranks=ranks, echo=False)


@pytest.mark.parametrize(("when", "step"), [(0, 1), (1, 2)])
def test_one_unit_in_the_last_place_on_one_rank(ranks, when, step):
    proof = proved(ranks, partial(Biased, when))
    assert [row["equal"] for row in proof.candidates] == ["bits", "no"]
    assert proof.candidates[1]["first_difference"]["step"] == step
    assert "other bits" in proof.candidates[1]["reason"]
    assert proof.verdict == "fail"


def test_masks_that_depend_on_the_rank(ranks):
    proof = proved(ranks, Drops)
    assert [row["equal"] for row in proof.candidates] == ["bits", "no"]
    assert proof.verdict == "fail"


def test_what_is_equally_wrong_everywhere_fails_on_one_device(ranks):
    proof = proved(ranks, partial(nn.Linear, 3, 4), share_mean)
    assert [row["equal"] for row in proof.candidates] == ["no", "no"]
    assert "one device" in proof.candidates[1]["reason"]
    assert proof.verdict == "fail"


class Counting(nn.Module):
    """Its output follows a buffer that counts steps."""

    def __init__(self, persistent, factor=0.0):
        super().__init__()
        self.net, self.factor = nn.Linear(3, 4), factor
        self.register_buffer("calls", torch.zeros(()), persistent=persistent)

    def forward(self, x):
        self.calls += 1 + self.factor * rank()
        return self.net(x) * self.calls


@pytest.mark.parametrize("persistent", [True, False])
def test_a_buffer_that_counts_moves_once_a_step(ranks, persistent):
    assert proved(ranks, partial(Counting, persistent)).verdict == "pass"
    proof = proved(ranks, partial(Counting, persistent, 2.0**-20))
    assert [row["equal"] for row in proof.candidates] == ["bits", "no"]


def test_what_is_right_passes(ranks):
    assert proved(ranks, partial(nn.Linear, 3, 4)).verdict == "pass"
