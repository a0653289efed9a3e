"""Activation checkpointing computes a part of the model twice; what the part counts must count once."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import kway


def own(output, _):
    return output.flatten(1).sum(1)


class Counting(nn.Module):
    """Counts samples in place and passes by assignment."""

    def __init__(self):
        super().__init__()
        self.register_buffer("placed", torch.zeros((), dtype=torch.int64))
        self.register_buffer("assigned", torch.zeros(()))

    def forward(self, x):
        self.placed += 1
        self.assigned = self.assigned + 1
        return x * 1.0


class Block(nn.Module):
    """Everything lies in a part that is computed again in backward."""

    def __init__(self, reentrant, *layers):
        super().__init__()
        self.reentrant, self.inner = reentrant, nn.Sequential(*layers)

    def forward(self, x):
        if self.reentrant is None:
            return self.inner(x)
        x = x.requires_grad_() if self.reentrant else x
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


def w17(reentrant):
    return Block(reentrant, nn.BatchNorm1d(1), Counting(), nn.Tanh())


ROWS = torch.tensor([[1.0], [2.0], [3.0], [4.0]], dtype=torch.float64)


def job_of(model, data=ROWS, **more):
    more = {"optimizer": partial(torch.optim.SGD, lr=0.1), "precision": "fp64", "shuffle": False, **more}
    more = {"batch_size": len(data), "loss": own, **more}
    return kway.Job(model=model, data=(data, torch.zeros(len(data))), **more)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(
    ("level", "size"), [("math", 1), ("math", 2), ("bits", 1), ("bits", 2), ("loose", 1)]
)
def test_w17_running_statistics_move_once(trained, reentrant, level, size):
    strategy = "data" if size > 1 else "single"
    run = trained(job_of(partial(w17, reentrant)), size, exactness=level, shards=2, strategy=strategy)
    norm, counter = run.model.inner[0], run.model.inner[1]
    # Computed twice, they would be .475, 1.12667 and 2.
    assert float(norm.running_mean) == pytest.approx(0.25, rel=1e-14)
    assert float(norm.running_var) == pytest.approx(1.0666666666666667, rel=1e-14)
    assert int(norm.num_batches_tracked) == 1
    # At bits, too, where a rank computes two shards or one.
    assert (int(counter.placed), float(counter.assigned)) == (1, 1)


@pytest.mark.parametrize("reentrant", [False, True])
def test_w17_loose_statistics_of_each_device_move_once(trained, reentrant):
    run = trained(job_of(partial(w17, reentrant)), 2, exactness="loose")
    norm = run.model.inner[0]
    assert float(norm.running_mean) == pytest.approx(0.25, rel=1e-14)  # the mean of .15 and .35
    assert float(norm.running_var) == pytest.approx(0.9 + 0.1 * 0.5, rel=1e-14)
    assert int(norm.num_batches_tracked) == 1


@pytest.mark.parametrize("reentrant", [False, True])
def test_w17_micro_batches_each_count_once(trained, reentrant):
    job = job_of(partial(w17, reentrant), micro_batch=2)
    run = trained(job, 1, exactness="loose", strategy="single")
    norm, counter = run.model.inner[0], run.model.inner[1]
    assert int(norm.num_batches_tracked) == int(counter.placed) == 2
    assert float(norm.running_mean) == pytest.approx(0.9 * 0.15 + 0.35, rel=1e-14)


G = torch.Generator().manual_seed(0)
X = torch.randn(23, 6, generator=G, dtype=torch.float64)


def deep(reentrant, drop=0.0):
    return nn.Sequential(
        nn.Linear(6, 8),
        Block(reentrant, nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(drop), nn.Linear(8, 8)),
        Block(reentrant, nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(drop), nn.Tanh(), nn.Linear(8, 3)),
    )


MOMENTUM = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


@pytest.mark.parametrize(
    ("level", "size"), [("math", 1), ("math", 3), ("bits", 1), ("bits", 2), ("loose", 2)]
)
def test_w17_a_checkpointed_model_trains_as_the_plain_one(trained, level, size):
    """Dropout included: the part that is computed again draws the masks that it drew before."""

    def weights(how):
        job = job_of(partial(deep, how, 0.4), X, batch_size=8, optimizer=MOMENTUM)
        return trained(job, size, exactness=level, shards=3, epochs=2).model.state_dict()

    plain, *others = (weights(how) for how in (None, False, True))
    for again in others:
        for name, value in plain.items():
            torch.testing.assert_close(again[name], value, rtol=0, atol=1e-12, msg=name)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("level", ["math", "bits"])
def test_w17_the_proof_wants_one_update_too(ranks, reentrant, level):
    proof = kway.prove(
        job_of(partial(deep, reentrant, 0.2), X, batch_size=8),
        devices="1,2,3",
        exactness=level,
        shards=3,
        ranks=ranks,
        echo=False,
    )
    assert proof.verdict == "pass", [(row["equal"], row["reason"]) for row in proof.candidates]


def test_w17_the_proof_finds_statistics_that_move_twice(monkeypatch):
    monkeypatch.setattr("kway.strategies.engine.buffers_kept", nullcontext)
    proof = kway.prove(job_of(partial(deep, False), X, batch_size=8), devices="1", strategy="single")
    assert proof.verdict == "fail"
    assert proof.candidates[0]["first_difference"]["tensor"].endswith(("running_mean", "running_var"))
