"""Process-wide settings of the caller hold on every rank and in every loader worker."""

import random
from functools import partial

import pytest
import torch
from torch import nn

import kway


class Noisy(torch.utils.data.Dataset):
    def __len__(self):
        return 11

    def __getitem__(self, index):
        return torch.arange(5.0) * index + random.random() + torch.rand(5), torch.ones(2)


@pytest.mark.parametrize("workers", [0, 1])
def test_the_default_dtype_of_the_caller_holds_everywhere(ranks, workers):
    job = kway.Job(
        model=partial(nn.Linear, 5, 2),
        loss=nn.MSELoss(),
        optimizer=partial(torch.optim.SGD, lr=1e-4),
        data=Noisy(),
        batch_size=4,
        precision="fp64",
        workers=workers,
    )
    torch.set_default_dtype(torch.float64)
    try:
        one = kway.train(job, devices="cpu:1", epochs=1).epochs[-1]["train_loss"]
        two = kway.train(job, devices="cpu:2", epochs=1, ranks=ranks).epochs[-1]["train_loss"]
        plain = kway.train(kway.Job(**{**vars(job), "workers": 0}), devices="cpu:1", epochs=1)
    finally:
        torch.set_default_dtype(torch.float32)
    assert two == pytest.approx(one, rel=1e-12)
    assert plain.epochs[-1]["train_loss"] == pytest.approx(one, rel=1e-12)


def test_init_runs_once_on_any_number_of_devices(ranks):
    def double(model):
        with torch.no_grad():
            model.weight.mul_(2)

    for devices in ("cpu:1", "cpu:2"):
        model = nn.Linear(2, 1, bias=False)
        before = model.weight.detach().clone()
        job = kway.Job(
            model=model,
            loss=nn.MSELoss(),
            optimizer=partial(torch.optim.SGD, lr=0.0),
            data=(torch.ones(4, 2), torch.ones(4, 1)),
            batch_size=4,
            init=double,
        )
        kway.train(job, devices=devices, epochs=1, ranks=ranks)
        assert torch.equal(model.weight, 2 * before), devices


@pytest.mark.parametrize("level", ["math", "bits"])
def test_a_forward_of_its_own_in_batch_normalisation_is_refused(ranks, level):
    class Own(nn.BatchNorm1d):
        def forward(self, x):
            return super().forward(x) * 0

    job = kway.Job(
        model=lambda: nn.Sequential(Own(2), nn.Linear(2, 1)),
        loss=nn.MSELoss(),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        data=(torch.randn(8, 2), torch.ones(8, 1)),
        batch_size=8,
    )
    with pytest.raises(kway.RefusedError, match="forward of its own"):
        kway.train(job, devices="cpu:2", epochs=1, exactness=level, shards=2, ranks=ranks)


def test_an_output_and_a_target_of_other_shapes_are_refused():
    job = kway.Job(
        model=partial(nn.Linear, 3, 1),
        loss=nn.MSELoss(),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        data=(torch.randn(8, 3), torch.ones(8)),
        batch_size=4,
    )
    with pytest.raises(kway.UsageError, match=r"\(4, 1\).*\(4,\)"):
        kway.train(job, devices="cpu:1", epochs=1)


@pytest.mark.parametrize(
    ("penalty", "said"),
    [
        (lambda model: torch.zeros(3), r"the penalty has shape \(3,\): it must be one number, .* \.sum\(\)"),
        (lambda model: None, "the penalty is of type NoneType: it must be one number"),
        (lambda model: (model.weight.sum(),), "the penalty is of type tuple: it must be one number"),
        (lambda model: [model.weight.sum()], "the penalty is of type list: it must be one number"),
    ],
)
def test_a_penalty_that_is_no_number_is_refused(penalty, said):
    job = kway.Job(
        model=partial(nn.Linear, 3, 1),
        loss=nn.MSELoss(),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        data=(torch.randn(8, 3), torch.ones(8, 1)),
        batch_size=4,
        penalty=penalty,
    )
    with pytest.raises(kway.UsageError, match=said):
        kway.train(job, devices="cpu:1", epochs=1)
    with pytest.raises(kway.UsageError, match=said):
        kway.prove(job, devices="cpu:1", steps=1)
    whole = kway.Job(**{**vars(job), "penalty": lambda model: model.weight.square().sum().view(1)})
    assert kway.train(whole, devices="cpu:1", epochs=1).record.steps == 2


def test_an_epoch_without_a_batch_is_refused():
    data = torch.utils.data.TensorDataset(torch.ones(10, 1), torch.ones(10, 1))
    loader = torch.utils.data.DataLoader(data, batch_size=64, drop_last=True)
    job = kway.Job(
        model=partial(nn.Linear, 1, 1),
        loss=nn.MSELoss(),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        data=loader,
    )
    with pytest.raises(kway.DataError, match="at least one whole batch"):
        kway.train(job, devices="cpu:1", epochs=1)
