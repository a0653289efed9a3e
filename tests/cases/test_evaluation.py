"""Evaluation counts every sample once, by name, and all ranks decide from the same number."""

from functools import partial

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import kway


class Same(nn.Module):
    """Predicts its input; the weight is there to have one."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.w * x


def target_as_loss(output, target):
    return output * 0 + target


def job_of(x, losses, **more):
    more = {"optimizer": partial(torch.optim.SGD, lr=1.0), "precision": "fp64", **more}
    data = more.pop("data", (torch.as_tensor(x), torch.as_tensor(losses)))
    return kway.Job(model=Same, loss=target_as_loss, data=data, **more)


def evaluate_rank(context, job):
    return kway.evaluate(job, devices="auto", strategy="data"), kway.predict(job, strategy="data").tolist()


CASES = [
    ([10.0, 0.0, 0.0, 0.0, 0.0], 2),
    ([10.0, 0.0, 0.0, 0.0, 0.0], 5),
    ([1.0, 5.0, 12.0], 4),
    ([7.0], 2),
    ([float(i * i) for i in range(11)], 3),
]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize(("losses", "batch"), CASES)
def test_w06_every_sample_counts_once_and_predictions_keep_their_order(ranks, losses, batch, size):
    x = torch.arange(float(len(losses)), dtype=torch.float64)
    job = job_of(x, torch.tensor(losses, dtype=torch.float64), batch_size=batch, metrics={"count": counted})
    for values, predicted in ranks.run(evaluate_rank, job, size=size):
        assert values["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-14)
        assert values["count"] == len(losses)
        assert predicted == x.tolist()


def counted(output, target):
    """The number of samples, over the number of times that the first one was seen."""
    return torch.tensor(float(len(output))), (output == 0).sum()


def test_w06_no_samples_is_an_error():
    with pytest.raises(kway.DataError, match="empty"):
        kway.evaluate(job_of(torch.zeros(0), torch.zeros(0)), devices="cpu:1")


def own_mean(output, target):
    return float(target.mean())


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("samples", [9, 8])
def test_w07_a_metric_that_is_a_mean_is_weighted_by_its_samples(ranks, samples, size):
    values = torch.arange(float(samples), dtype=torch.float64)
    job = job_of(values, values, batch_size=5 * size, metrics={"mean": own_mean})
    for found, _ in ranks.run(evaluate_rank, job, size=size):
        assert found["mean"] == pytest.approx((samples - 1) / 2, rel=1e-14)  # not 3.6, not 4.4


def test_w07_a_loader_that_drops_its_last_batch_gives_whole_batches():
    values = torch.arange(9.0, dtype=torch.float64)
    loader = DataLoader(TensorDataset(values, values), batch_size=5, drop_last=True)
    job = job_of(values, values, data=loader)
    assert kway.predict(job, devices="cpu:1").tolist() == [0, 1, 2, 3, 4]  # 5 samples, not 4
    assert kway.evaluate(job, devices="cpu:1")["loss"] == 2.0


def even(output, target):
    chosen = output[output % 2 == 0]
    return chosen.sum(), torch.tensor(float(len(chosen)))


def odd(output, target):
    chosen = output[output % 2 == 1]
    return chosen.sum(), torch.tensor(float(len(chosen)))


def nothing(output, target):
    return torch.zeros(()), torch.zeros(())


METRICS = {"even": even, "odd": odd, "nothing": nothing}


@pytest.mark.parametrize("names", [["even", "odd", "nothing"], ["nothing", "odd", "even"]])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_w09_metrics_go_by_name_and_by_their_own_weights(ranks, names, size):
    x = torch.tensor([4.0, 6.0, 7.0], dtype=torch.float64)
    losses = torch.tensor([1.0, 3.0, 8.0], dtype=torch.float64)
    job = job_of(x, losses, batch_size=8, metrics={name: METRICS[name] for name in names})
    for values, _ in ranks.run(evaluate_rank, job, size=size):
        assert (values["loss"], values["even"], values["odd"]) == (4.0, 5.0, 7.0)
        assert np.isnan(values["nothing"])


class Counter(nn.Module):
    """w grows by the learning rate a step in training; the loss of a validation sample is ``a + b * w``."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.tensor(-1.0, dtype=torch.float64))

    def forward(self, x):
        return torch.where(x[:, 2] > 0, -self.w, x[:, 0] + x[:, 1] * self.w)


def plateau(optimizer):
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)


def as_it_is(output, _):
    return output


def test_h04_all_ranks_take_one_decision_from_one_number(trained, tmp_path):
    train = torch.tensor([[0.0, 0.0, 1.0]] * 2, dtype=torch.float64)
    # Losses [1, 3] at w = 0, then [2.5, 0.5] at w = 1: a rank by itself would see 1 < 2.5.
    held = torch.tensor([[1.0, 1.5, 0.0], [3.0, -2.5, 0.0]], dtype=torch.float64)
    job = kway.Job(
        model=Counter,
        loss=as_it_is,
        optimizer=partial(torch.optim.SGD, lr=1.0),
        data=(train, train),
        validation=(held, held),
        batch_size=2,
        precision="fp64",
        schedule=plateau,
    )
    run = trained(job, 2, epochs=2, save_best="validation_loss", out=tmp_path / "run")
    assert [row["validation_loss"] for row in run.epochs] == [2.0, 1.5]
    assert [row["lr"] for row in run.epochs] == [1.0, 1.0]
    assert run.record.best == {"metric": "validation_loss", "value": 1.5, "epoch": 2, "step": 2}
    assert float(load_file(tmp_path / "run" / "best.safetensors")["w"]) == 1.0
    worse = torch.tensor([[1.0, 1.5, 0.0], [3.0, -0.5, 0.0]], dtype=torch.float64)
    run = trained(
        kway.Job(**{**vars(job), "validation": (worse, worse)}),
        2,
        epochs=3,
        save_best="validation_loss",
        out=tmp_path / "worse",
    )
    assert [row["validation_loss"] for row in run.epochs] == [2.0, 2.5, 2.75]
    assert [row["lr"] for row in run.epochs] == [1.0, 0.5, 0.25]
    assert run.record.best["epoch"] == 1
    assert float(load_file(tmp_path / "worse" / "best.safetensors")["w"]) == 0.0
