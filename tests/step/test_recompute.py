"""Activation checkpointing of blocks: less is kept, nothing else changes."""

import random
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

import kway
from kway.step.recompute import blocks_of
from kway.zoo import get


class Block(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(width, width), nn.BatchNorm1d(width), nn.Tanh(), nn.Dropout(0.3)
        )
        self.calls = 0

    def forward(self, x, scale=1.0):
        self.calls += 1
        return x + scale * self.layers(x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.blocks, self.last = (
            nn.Linear(3, 6),
            nn.ModuleList(Block() for _ in range(3)),
            nn.Linear(6, 2),
        )

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x, scale=0.5)
        return self.last(x)


G = torch.Generator().manual_seed(0)
DATA = torch.randn(24, 3, generator=G), torch.arange(24) % 2


def job(model=Net, **more):
    sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    return kway.Job(model, nn.CrossEntropyLoss(), sgd, DATA, batch_size=8, precision="fp64", **more)


class Drawing(Block):
    """Draws from NumPy and Python."""

    def forward(self, x):
        return super().forward(x * (1 + 0.1 * np.random.randn() + 0.1 * random.random()))


@pytest.mark.parametrize("exactness", ["math", "bits"])
def test_the_same_bits_are_trained_with_less_kept(exactness):
    more = {"devices": "cpu:1", "epochs": 2, "exactness": exactness, "shards": 4}
    plain = kway.train(job(), **more)
    again = kway.train(job(), **more, settings={"recompute": True})
    # Running statistics, dropout masks and counters among them: a part that ran twice counts once.
    assert again.record.weights_sha256 == plain.record.weights_sha256
    calls = [[block.calls for block in run.model.blocks] for run in (plain, again)]
    assert calls[1] == [2 * count for count in calls[0]]
    assert all("forward" not in vars(block) for block in again.model.blocks)


def test_random_numbers_of_the_host_are_those_of_one_pass():
    def model():
        return nn.Sequential(nn.Linear(3, 6), nn.Sequential(Drawing(), Drawing()), nn.Linear(6, 2))

    plain, again = (
        kway.train(job(model), devices="cpu:1", epochs=1, settings=settings)
        for settings in ({}, {"recompute": True})
    )
    assert again.record.weights_sha256 == plain.record.weights_sha256


def test_it_is_proved_on_two_ranks(ranks):
    proof = kway.prove(job(), devices="1,2", settings={"recompute": True}, ranks=ranks.of(2))
    assert proof.verdict == "pass", str(proof)


def test_blocks_are_the_items_of_the_outermost_lists():
    assert [name for name, _ in blocks_of(Net())] == ["blocks.0", "blocks.1", "blocks.2"]
    assert next(name for name, _ in blocks_of(get("gpt-1m")((16,), 64))) == "blocks.0"
    assert blocks_of(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))) == []


@pytest.mark.parametrize("call", [partial(kway.train, epochs=1), kway.prove, kway.tune])
def test_a_model_without_blocks_is_one_error_before_anything_starts(tmp_path, call):
    model = partial(nn.Linear, 3, 2)
    with pytest.raises(kway.UsageError, match="no blocks"):
        # A proof said that the result was another one.
        call(job(model), devices="cpu:1", settings={"recompute": True}, out=tmp_path / "run")
    assert not list(tmp_path.iterdir())
