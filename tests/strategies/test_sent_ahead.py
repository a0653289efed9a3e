"""Gradients that are sent while backward still computes others: the same steps as when all are sent at its end."""

from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import kway
from kway.comm import buckets

DRAW = torch.Generator().manual_seed(0)
X = torch.randn(22, 6, generator=DRAW, dtype=torch.float64)
Y = torch.randint(3, (22,), generator=DRAW)


def plain():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Dropout(0.2), nn.Linear(8, 3))


def normed():
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))


class Routed(nn.Module):
    """Uses one of two layers, by its first number: on some ranks a layer has no gradient."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.last(self.first(x) if x[0, 0] > 0 else self.second(x))


class Shared(nn.Module):
    """Reaches a layer twice in one backward pass."""

    def __init__(self):
        super().__init__()
        self.layer, self.last = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.last(self.layer(torch.tanh(self.layer(x))))


class Summed(torch.autograd.Function):
    """Sums over the ranks, by a collective of its own in one or both passes, what does not count: it is zero."""

    @staticmethod
    def forward(ctx, x, there):
        found = x.sum()
        if there:
            dist.all_reduce(found)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        dist.all_reduce(grad.sum())
        return grad, None


class Talking(nn.Module):
    """Communicates by itself between its layers."""

    def __init__(self, there):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.there = there

    def forward(self, x):
        return self.last(torch.tanh(self.second(Summed.apply(torch.tanh(self.first(x)), self.there))))


def steps(context, model, limit, more):
    """Take five steps; return the weights, and how many buckets each step sent before its end."""
    sent = []
    finish = buckets.Buckets.finish

    def counted(self, *arguments):
        sent.append(len(self._pending))
        return finish(self, *arguments)

    job = kway.Job(
        model=model, loss=nn.CrossEntropyLoss(), data=(X, Y), precision="fp64",
        optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9), **{"batch_size": 5, **more},
    )  # fmt: skip
    with (
        mock.patch.object(buckets, "BUCKET_BYTES", limit),
        mock.patch.object(buckets.Buckets, "finish", counted),
        kway.parallel(job, strategy="data", exactness=more.get("exactness", "math")) as p,
    ):
        for batch in p.batches(0):
            p.step(batch)
        return [parameter.detach().clone() for parameter in p.model.parameters()], sent


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("model", "more", "ahead"),
    [
        (plain, {}, True),
        (plain, {"micro_batch": 1}, True),
        (plain, {"clip": 0.1, "ema": 0.9}, True),
        (Shared, {}, True),
        (Routed, {}, True),
        # What it communicates in backward must not come between buckets.
        (normed, {}, False),
        (partial(Talking, True), {}, False),
        (partial(Talking, False), {}, False),
    ],
)
def test_what_is_sent_ahead_gives_the_same_steps(ranks, model, more, ahead, size):
    found = ranks.run(steps, model, 256, more, size=size)
    whole = ranks.run(steps, model, 10**9, more, size=size)
    for (weights, _), (right, late) in zip(found, whole, strict=True):
        assert not any(late)
        for one, other in zip(weights, right, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-13)
    sent = [count for _, counts in found for count in counts]
    assert any(sent) == ahead
    # Before the first step there is nothing that could send; of the last batch some ranks have no sample to send of.
    assert all(counts[0] == 0 for _, counts in found)


def without_samples(context):
    """Return how many buckets each step sent before its end, on a rank and in a step."""
    return steps(context, plain, 256, {})[1]


def test_nothing_is_sent_ahead_where_a_rank_has_no_sample(ranks):
    # Batches of 5, 5, 5, 5 and 2 samples.
    found = ranks.run(without_samples, size=4)
    assert all(counts[3] > 0 and counts[4] == 0 for counts in found)
