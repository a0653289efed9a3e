"""What jobs advise where they cannot run as they were asked to."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

import kway

X, Y = torch.randn(9, 3, generator=torch.Generator().manual_seed(0)), torch.arange(9) % 4


def job(samples=9):
    def model():
        return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 4))

    sgd = partial(torch.optim.SGD, lr=0.1)
    return kway.Job(model, nn.CrossEntropyLoss(), sgd, (X[:samples], Y[:samples]), batch_size=4)


@pytest.mark.parametrize("strategy", ["data=4", "threads=4"])
def test_more_cpu_ranks_are_advised_where_cpus_were_named(strategy):
    with pytest.raises(kway.UsageError, match=r"it needs 4; use --devices cpu:4, or name"):
        kway.train(job(8), devices="cpu:2", strategy=strategy)
    proof = kway.prove(job(8), devices="cpu:2", strategy=strategy)
    assert "use --devices cpu:4, or name" in proof.candidates[0]["reason"]
    with pytest.raises(kway.UsageError, match=r"use --devices cpu:4, or name"):
        kway.plan(job(8), devices="cpu:2", strategy=strategy)


@pytest.mark.parametrize("exactness", ["math", "bits"])
@pytest.mark.parametrize("call", [kway.train, kway.prove])
def test_a_batch_that_has_no_statistics_is_one_clear_error(call, exactness):
    with pytest.raises(
        kway.UsageError, match=r"^a batch of 1 sample, on which .*more than 1 value"
    ) as caught:
        call(job(samples=1), devices="cpu:1", exactness=exactness, steps=1)
    assert "a larger batch" in caught.value.do


def test_the_last_batch_of_an_epoch_may_be_the_one_that_has_none():
    with pytest.raises(
        kway.UsageError, match=r"^a batch of 1 sample, .* one that leaves a larger rest or none$"
    ):
        kway.train(job(), devices="cpu:1", epochs=1)


def test_an_error_of_the_users_own_in_like_words_comes_through():
    def loss(output, target):
        raise ValueError("expected more than 1 value per class, got one label")

    with pytest.raises(ValueError, match="per class") as caught:
        kway.train(replace(job(), loss=loss), devices="cpu:1", steps=1)
    assert type(caught.value) is ValueError
