"""Batches whose samples lie along another dimension than the first, as sequence models like them."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import kway

STEPS, SAMPLES, CLASSES = 5, 7, 3
DRAWS = torch.Generator().manual_seed(0)
X = torch.randn(SAMPLES, STEPS, 4, generator=DRAWS, dtype=torch.float64)
Y = torch.randint(0, CLASSES, (SAMPLES, STEPS), generator=DRAWS)
Y[0, 3:] = Y[2, 1:] = -100  # sequences of other lengths


class Recurrent(nn.Module):
    """Time first: (time, samples, features) to (time, samples, classes), flattened for the loss."""

    def __init__(self):
        super().__init__()
        self.memory = nn.LSTM(4, 6)
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x):
        return self.head(self.memory(x)[0])


def time_first(samples):
    return torch.stack([x for x, _ in samples], 1), torch.stack([y for _, y in samples], 1)


def weighed(output, target):
    losses = nn.functional.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="none")
    return losses.sum(), (target != -100).sum()


def right(output, target):
    valid = target != -100
    return ((output.argmax(2) == target) & valid).sum(), valid.sum()


def job_of(model, x=X, **more):
    data = DataLoader(list(zip(x, Y, strict=True)), batch_size=4, collate_fn=time_first)
    sgd = partial(torch.optim.SGD, lr=0.3, momentum=0.9)
    settings = {"precision": "fp64", "metrics": {"accuracy": right}, "validation": data, **more}
    return kway.Job(model=model, loss=weighed, optimizer=sgd, data=data, **settings)


def by_hand(epochs):
    """Plain torch on one device: the weights, and loss and accuracy over all samples afterwards."""
    torch.manual_seed(0)
    model = Recurrent().double()
    start = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    for _ in range(epochs):
        for first in range(0, SAMPLES, 4):
            x, y = X[first : first + 4].transpose(0, 1), Y[first : first + 4].transpose(0, 1)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
            optimizer.step()
    with torch.no_grad():
        output, target = model(X.transpose(0, 1)), Y.transpose(0, 1)
        value = nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())
        hits, count = right(output, target)
    return start, model.state_dict(), float(value), int(hits) / int(count)


@pytest.fixture
def trained(ranks):
    def run(job, size, **more):
        more = {"epochs": 2, "echo": False, "strategy": "data" if size > 1 else "single", **more}
        return kway.train(job, devices=f"cpu:{size}", ranks=ranks, **more)

    return run


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("micro_batch", [None, 1])
def test_samples_along_the_second_dimension_give_what_one_device_gives(trained, size, micro_batch):
    start, weights, value, accuracy = by_hand(2)
    run = trained(
        job_of(Recurrent, init=partial(nn.Module.load_state_dict, state_dict=start), micro_batch=micro_batch),
        size,
    )
    for name, tensor in run.model.state_dict().items():
        assert torch.allclose(tensor, weights[name], rtol=0, atol=1e-12)
    assert run.epochs[-1]["validation_loss"] == pytest.approx(value, rel=1e-12)
    assert run.epochs[-1]["accuracy"] == pytest.approx(accuracy, rel=1e-12)


def test_their_bits_are_equal_on_any_number_of_ranks(trained):
    runs = [
        trained(job_of(Recurrent, precision="fp32", x=X.float()), size, exactness="bits", shards=4)
        for size in (1, 2, 3, 4)
    ]
    assert len({run.record.weights_sha256 for run in runs}) == 1
    assert all(run.epochs[-1]["accuracy"] == runs[0].epochs[-1]["accuracy"] for run in runs)


@pytest.mark.parametrize("level", ["math", "bits"])
@pytest.mark.parametrize("shards", [3, 4])
def test_a_proof_of_them_passes(ranks, level, shards):
    proof = kway.prove(
        job_of(Recurrent),
        devices="cpu:1 cpu:2 cpu:3",
        exactness=level,
        shards=shards,
        ranks=ranks,
        echo=False,
    )
    assert proof.verdict == "pass", proof.candidates


def test_predictions_along_another_dimension_are_refused_not_mixed_up():
    with pytest.raises(kway.UsageError, match="first dimension must be the samples"):
        kway.predict(job_of(Recurrent), devices="cpu:1")
