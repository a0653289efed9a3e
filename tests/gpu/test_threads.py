"""Strategy threads on GPUs: the mathematics of one, and the bits of one, by threads of this process."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

import kway

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
G = torch.Generator().manual_seed(0)
X, Y = torch.randn(53, 1, 8, 8, generator=G), torch.arange(53) % 4


def net():
    return nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2), nn.Linear(288, 4)
    )


def job_of(**more):
    return kway.Job(
        model=net,
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.SGD, lr=0.05, momentum=0.9),
        data=(X, Y),
        batch_size=24,
        **more,
    )


def sets():
    return [f"cuda:{','.join(map(str, range(count)))}" for count in range(2, torch.cuda.device_count() + 1)]


def test_the_proof_holds_on_two_and_more(two):
    devices = " ".join(["cuda:0", *sets()])
    proof = kway.prove(job_of(), devices=devices, strategy="threads", echo=False)
    assert proof.verdict == "pass", [(row["equal"], row["reason"]) for row in proof.candidates]


def test_bits_are_those_of_one_gpu(two):
    options = {"exactness": "bits", "shards": 8, "epochs": 3, "tune": False}
    alone = kway.train(job_of(), devices="cuda:0", **options)
    for devices in sets():
        run = kway.train(job_of(), devices=devices, strategy="threads", **options)
        assert run.record.weights_sha256 == alone.record.weights_sha256, devices


def test_large_gradients_are_summed_as_processes_do(two):
    # Gradients of 1 MiB, and of 256 KiB: reduced where backward left them, several at once where ranks are processes.
    def wide():
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 4096), nn.ReLU(), nn.Linear(4096, 16))

    job = replace(job_of(precision="fp64"), model=wide)
    losses = [
        [
            row["train_loss"]
            for row in kway.train(job, devices=two, strategy=name, epochs=3, tune=False, echo=False).epochs
        ]
        for name in ("threads", "data")
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)


def test_dropout_draws_from_each_gpu_so_that_steps_run_side_by_side(two):
    before = torch.cuda.get_rng_state_all(), torch.cuda.current_device()
    run = kway.train(job_of(), devices=two, strategy="threads", epochs=3, tune=False)
    data = kway.train(job_of(), devices=two, strategy="data", epochs=3, tune=False, echo=False)
    assert "one after the other" not in str(run.record.notices)
    for row, other in zip(run.epochs, data.epochs, strict=True):
        assert row["train_loss"] == pytest.approx(other["train_loss"], rel=1e-3)
    assert {p.device for p in run.model.parameters()} == {torch.device("cuda:0")}
    assert all(torch.equal(a, b) for a, b in zip(before[0], torch.cuda.get_rng_state_all(), strict=True))
    assert torch.cuda.current_device() == before[1]
