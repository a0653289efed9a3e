import os
from functools import partial

import pytest
import torch
from torch import nn

import kway
from kway.zoo import get

pytestmark = pytest.mark.gpu


def job(model="lenet", batch=13):
    draw = torch.Generator().manual_seed(2)
    data = torch.rand(3 * batch, 1, 28, 28, generator=draw), torch.randint(10, (3 * batch,), generator=draw)
    return kway.Job(
        model=partial(get(model), (1, 28, 28), 10),
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        data=data,
        batch_size=batch,
    )


def rows_of(proof):
    return [
        (row["devices"], row["equal"], row["reason"], row["first_difference"]) for row in proof.candidates
    ]


class Skewed(nn.Module):
    """Wrong by a factor on every rank but the first."""

    def __init__(self, factor):
        super().__init__()
        self.inner, self.factor = nn.Linear(784, 10), factor

    def forward(self, images):
        return self.inner(images.flatten(1)) * (1 + self.factor * int(os.environ.get("RANK", "0")))


@pytest.mark.parametrize("precision", ["fp64", "fp32", "tf32"])
def test_one_gpu_is_proved_against_plain_torch(one, precision):
    proof = kway.prove(job(), devices=one, precision=precision)
    assert proof.verdict == "pass", rows_of(proof)
    assert proof.reference["device"] == one


@pytest.mark.parametrize("precision", ["fp64", "fp32"])
@pytest.mark.parametrize(("model", "batch"), [("lenet", 13), ("resnet18", 7)])
def test_two_gpus_are_proved(pair, one, two, model, batch, precision):
    proof = kway.prove(job(model, batch), devices=f"{one} {two}", precision=precision, ranks=pair)
    assert proof.verdict == "pass", rows_of(proof)
    assert [row["devices"] for row in proof.candidates] == [1, 2]
    assert all(sum(shares) <= batch for shares in proof.candidates[1]["shares"])


@pytest.mark.parametrize(("precision", "factor"), [("fp64", 1e-6), ("fp32", 1e-3)])
def test_a_model_that_depends_on_the_rank_fails_the_proof(pair, two, precision, factor):
    given = kway.Job(
        model=partial(Skewed, factor),
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        data=job().data,
        batch_size=13,
    )
    proof = kway.prove(given, devices=two, precision=precision, ranks=pair)
    assert proof.verdict == "fail"
    assert proof.candidates[0]["equal"] == "no"
    assert proof.candidates[0]["first_difference"]["step"] == 1


@pytest.mark.parametrize("model", ["lenet", "resnet18"])
def test_bits_are_proved_on_two_gpus(one, two, model):
    """Ranks of their own: cuBLAS reads its workspace when it starts, so warm ranks may be too late."""
    proof = kway.prove(job(model, 16), devices=f"{one} {two}", exactness="bits")
    assert proof.verdict == "pass", rows_of(proof)
    assert [row["equal"] for row in proof.candidates] == ["bits", "bits"]
