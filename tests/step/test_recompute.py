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


class Appending(Block):
    """Appends to a list. What comes of it has another shape the second time, or does not fit the input."""

    def __init__(self, fits):
        super().__init__()
        self.fits = fits

    def forward(self, x, kept):
        kept.append(super().forward(x))
        every = torch.cat(kept)
        return x + every.exp().mean(0) if self.fits else x * (x + every)


class Lost(Block):
    """Raises what is no fault of its own, where it runs the second time or in a hook of backward."""

    def __init__(self, error, again):
        super().__init__()
        self.error, self.again = error, again

    def forward(self, x, kept):
        if self.again and self.calls:
            raise self.error
        y = super().forward(x)
        if not self.again:
            y.register_hook(self.fail)
        return y

    def fail(self, gradient):
        raise self.error


class Caching(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.first, self.last = nn.Linear(3, 6), nn.Linear(6, 2)
        self.blocks = nn.ModuleList(block() for _ in range(2))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x, [])
        return self.last(x)


@pytest.mark.parametrize(
    ("size", "fits", "said"),
    [
        (1, True, "CheckpointError"),
        (1, False, "RuntimeError: The size of tensor"),
        (2, True, "CheckpointError"),
    ],
)
def test_blocks_that_cannot_be_computed_again_are_one_clear_error(ranks, size, fits, said):
    own, more = job(partial(Caching, partial(Appending, fits))), {"devices": f"cpu:{size}", "steps": 1}
    with pytest.raises(kway.RefusedError, match=said) as caught:
        kway.train(own, **more, ranks=ranks, settings={"recompute": True})
    assert "Caching whose blocks cannot be computed again" in caught.value.got
    assert "leave recompute out" in caught.value.do
    # Once, they are as good as others.
    kway.train(own, **more, ranks=ranks)


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (torch.AcceleratorError("CUDA error: lost"), True),
        (KeyError("of a block"), True),
        (RuntimeError("of a hook"), False),
    ],
)
def test_what_else_goes_wrong_in_backward_is_not_taken_for_that(error, again):
    own = job(partial(Caching, partial(Lost, error, again)))
    with pytest.raises(type(error)) as caught:
        kway.train(own, devices="cpu:1", steps=1, settings={"recompute": True})
    assert not isinstance(caught.value, kway.KwayError)


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
