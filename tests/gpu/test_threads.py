"""Strategy threads on GPUs: the mathematics of one, and the bits of one, by threads of this process."""

from functools import partial

import pytest
import torch
from torch import nn

import kway
from kway.devices import select

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
G = torch.Generator().manual_seed(0)
X, Y = torch.randn(53, 1, 8, 8, generator=G), torch.arange(53) % 4


def net():
    return nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2), nn.Linear(288, 4)
    )


def plain():
    return nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4))


def wide():
    # Gradients of 1 MiB, and of 256 KiB: reduced where backward left them, several at once where ranks are processes.
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 4096), nn.ReLU(), nn.Linear(4096, 16))


def job_of(model=net, **more):
    return kway.Job(
        model=model,
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.SGD, lr=0.05, momentum=0.9),
        data=(X, Y),
        batch_size=24,
        **more,
    )


@pytest.fixture(params=["on_each", "on_one"])
def sets(request, monkeypatch):
    """Device sets of two and more replicas, and a model that they can train.

    Where all are on the first GPU, they share its random numbers, and torch's one thread for backward passes there:
    no layer may wait for another replica.
    """
    apart = request.param == "on_each"
    if apart:
        request.getfixturevalue("two")
    else:
        monkeypatch.setattr(select, "_listed", lambda text, rest, cluster: ["cuda:0"] * (1 + rest.count(",")))
    most = torch.cuda.device_count() if apart else 2
    found = [f"cuda:{','.join(map(str, range(count)))}" for count in range(2, most + 1)]
    return found, net if apart else plain


def test_the_proof_holds_on_two_and_more(sets):
    found, model = sets
    proof = kway.prove(job_of(model), devices=" ".join(["cuda:0", *found]), strategy="threads", echo=False)
    assert [row["devices"] for row in proof.candidates] == [*range(1, len(found) + 2)]
    assert proof.verdict == "pass", [(row["equal"], row["reason"]) for row in proof.candidates]


def test_bits_are_those_of_one_gpu(sets):
    found, model = sets
    job = job_of(model)
    options = {"exactness": "bits", "shards": 8, "epochs": 3, "tune": False, "echo": False}
    alone = kway.train(job, devices="cuda:0", **options)
    for devices in found:
        run = kway.train(job, devices=devices, strategy="threads", **options)
        assert run.record.weights_sha256 == alone.record.weights_sha256, devices


def test_large_gradients_are_summed_as_on_one_gpu(sets):
    found, _ = sets
    options = {"epochs": 3, "tune": False, "echo": False}
    alone = kway.train(job_of(wide, precision="fp64"), devices="cuda:0", **options)
    for devices in found:
        run = kway.train(job_of(wide, precision="fp64"), devices=devices, strategy="threads", **options)
        for row, other in zip(run.epochs, alone.epochs, strict=True):
            assert row["train_loss"] == pytest.approx(other["train_loss"], rel=1e-12), devices


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
