"""Compiled and recorded steps on GPUs are proved as eager ones are."""

import dataclasses
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


def laid_out():
    return get("lenet")((1, 28, 28), 10).to(memory_format=torch.channels_last)


def job(model="lenet", batch=13, loss=nn.CrossEntropyLoss, channels_last=False):
    draw = torch.Generator().manual_seed(2)
    data = torch.rand(6 * batch, 1, 28, 28, generator=draw), torch.randint(10, (6 * batch,), generator=draw)
    return kway.Job(
        model=laid_out if channels_last else partial(get(model), (1, 28, 28), 10),
        loss=loss(),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        data=data,
        batch_size=batch,
    )


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_kind_is_proved_against_plain_torch(first, count, kind):
    proof = kway.prove(job(), devices=first(count), step_kind=kind)
    assert proof.verdict == "pass", str(proof)
    assert proof.step_kind == kind, proof.notices
    assert proof.steps == (6 if KINDS[kind].records else 3)


LOSSES = {
    "weighed": partial(
        nn.CrossEntropyLoss, weight=torch.linspace(0.5, 2, 10), ignore_index=3, label_smoothing=0.1
    ),
    "summed": partial(nn.CrossEntropyLoss, reduction="sum"),
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_is_compiled_and_recorded_with_its_step(one, loss):
    seen = job(loss=LOSSES[loss], channels_last=True)
    proof = kway.prove(seen, devices=one, step_kind="compiled-graph")
    assert proof.verdict == "pass", str(proof)
    kernels = {
        event.name for event in traced(seen, one) if event.device_type == torch.autograd.DeviceType.CUDA
    }
    own = [name for name in kernels if "triton" in name]
    assert [name for name in own if "nll_loss" in name or "log_softmax" in name], kernels
    assert not [name for name in kernels - {*own} if "nll_loss" in name or "softmax" in name]


def traced(seen, device):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        kway.train(seen, devices=device, epochs=2, step_kind="compiled-graph")
        torch.cuda.synchronize()
    return profile.events()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", KINDS)
def test_bits_of_a_kind_are_those_of_one_gpu(first, kind):
    counts = [1, 2, *([4] if torch.cuda.device_count() >= 4 else [])]
    devices = " ".join(map(first, counts))
    proof = kway.prove(job(batch=16), devices=devices, exactness="bits", step_kind=kind)
    assert [row["equal"] for row in proof.candidates] == ["bits"] * len(counts), str(proof)
    assert [row["step_kind"] for row in proof.candidates] == [kind] * len(counts), proof.notices
    assert proof.certificate["holds_within"]["step_kind"] == kind


class Normalised(nn.Module):
    """Batch normalisation of two widths, one with a momentum of its own."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 8, 3)
        self.wide, self.narrow = nn.BatchNorm2d(4), nn.BatchNorm2d(8, momentum=0.3)
        self.last = nn.Linear(8, 10)

    def forward(self, x):
        x = torch.relu(self.wide(self.first(x)))
        return self.last(torch.relu(self.narrow(self.second(x))).mean((2, 3)))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["compiled", "compiled-graph"])
def test_batch_statistics_of_two_gpus_in_a_compiled_step_are_those_of_the_whole_batch(two, kind):
    proof = kway.prove(dataclasses.replace(job(), model=Normalised), devices=two, step_kind=kind)
    assert proof.verdict == "pass", str(proof)
    assert [row["step_kind"] for row in proof.candidates] == [kind], proof.notices
