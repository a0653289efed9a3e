"""Compiled and recorded steps on GPUs are proved as eager ones are."""

from functools import partial

import pytest
import torch
from torch import nn

import kway
from kway.devices.compilers import missing
from kway.step.kinds import KINDS
from kway.zoo import get

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(missing("cuda") is not None, reason=f"torch.compile: {missing('cuda')}"),
]


def job(model="lenet", batch=13):
    draw = torch.Generator().manual_seed(2)
    data = torch.rand(6 * batch, 1, 28, 28, generator=draw), torch.randint(10, (6 * batch,), generator=draw)
    return kway.Job(
        model=partial(get(model), (1, 28, 28), 10),
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        data=data,
        batch_size=batch,
    )


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_on_one_gpu_is_proved_against_plain_torch(one, kind):
    proof = kway.prove(job(), devices=one, step_kind=kind)
    assert proof.verdict == "pass", str(proof)
    assert proof.step_kind == kind, proof.notices
    assert proof.steps == (6 if KINDS[kind].records else 3)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", KINDS)
def test_bits_of_a_kind_are_those_of_one_gpu(one, two, kind):
    proof = kway.prove(job(batch=16), devices=f"{one} {two}", exactness="bits", step_kind=kind)
    assert [row["equal"] for row in proof.candidates] == ["bits", "bits"], str(proof)
    assert proof.certificate["holds_within"]["step_kind"] == kind
