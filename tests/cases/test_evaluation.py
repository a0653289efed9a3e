"""Evaluation counts every sample once, by name, and all ranks decide from the same number."""

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import kway
from kway.training.parts import training_parts


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


@pytest.mark.parametrize("batch_size", [5, 10])
def test_w07_a_loader_that_drops_its_last_batch_still_counts_every_sample(batch_size, capsys):
    values = torch.arange(9.0, dtype=torch.float64)
    loader = DataLoader(TensorDataset(values, values), batch_size=batch_size, drop_last=True)
    job = job_of(values, values, data=loader)
    assert kway.predict(job, devices="cpu:1").tolist() == list(range(9))  # 9 samples, not 5
    assert "drop_last of the DataLoader is not kept: every sample counts" in capsys.readouterr().err
    assert kway.evaluate(job, devices="cpu:1")["loss"] == 4.0


def test_w07_validation_counts_every_sample_and_a_notice_names_it():
    values = torch.arange(9.0, dtype=torch.float64)
    loader = DataLoader(TensorDataset(values, values), batch_size=5, drop_last=True)
    train, held = training_parts(job_of(values, values, data=loader, validation=loader))
    assert [train.order.steps(0), held.order.steps(0)] == [1, 2]
    assert held.notices == ["validation data: drop_last of the DataLoader is not kept: every sample counts"]
    assert train.notices == ["drop_last of the DataLoader is kept: the last 4 samples are left out"]


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


def by_kind(output, target):
    """Figures whose keys and order depend on the samples that a share holds."""
    found = {}
    for value, one in zip(output.tolist(), target.tolist(), strict=True):
        key = "odd" if value % 2 else "even"
        total, weight = found.get(key, (0.0, 0))
        found[key] = total + one, weight + 1
    return {"count": len(output) * torch.ones_like(output), **dict(reversed(found.items()))}


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("batch", [2, 8])
def test_w09_keys_that_depend_on_the_rank_go_by_name_with_their_own_counts(ranks, batch, size):
    x = torch.tensor([4.0, 7.0], dtype=torch.float64)
    losses = torch.tensor([1.0, 3.0], dtype=torch.float64)
    job = job_of(x, losses, batch_size=batch, metrics={"kinds": by_kind})
    for values, _ in ranks.run(evaluate_rank, job, size=size):
        assert {name: values[name] for name in ("loss", "even", "odd")} == {
            "loss": 2.0,
            "even": 1.0,
            "odd": 3.0,
        }
        assert list(values) == ["loss", "count", "even", "odd"]


def reported(output, target):
    """What each rank of the report logs: the same key for all, and one that the other has not."""
    return {
        "logged": target,
        "even" if float(output[0]) == 4 else "odd": 0.5 if float(output[0]) == 4 else 0.7,
    }


@pytest.mark.parametrize("swap", [False, True])
def test_w09_numbers_of_the_report(ranks, swap):
    order = [1, 0] if swap else [0, 1]
    x = torch.tensor([4.0, 7.0], dtype=torch.float64)[order]
    job = job_of(
        x, torch.tensor([1.0, 3.0], dtype=torch.float64)[order], batch_size=2, metrics={"m": reported}
    )
    for values, _ in ranks.run(evaluate_rank, job, size=2):
        assert values == {"loss": 2.0, "logged": 2.0, "even": 0.5, "odd": 0.7}  # and never even = 0.6


LEVELS = [("math", 1), ("math", 2), ("math", 3), ("loose", 2), ("bits", 1), ("bits", 2), ("bits", 4)]


@pytest.mark.parametrize("micro_batch", [None, 1])
@pytest.mark.parametrize(("level", "size"), LEVELS)
def test_w09_training_adds_by_name_too(trained, level, size, micro_batch):
    x = torch.tensor([4.0, 7.0, 6.0, 8.0, 2.0], dtype=torch.float64)
    losses = torch.tensor([1.0, 3.0, 5.0, 7.0, 11.0], dtype=torch.float64)
    job = job_of(
        x, losses, batch_size=3, shuffle=False, metrics={"kinds": by_kind}, validation=(x[1:2], losses[1:2]),
        micro_batch=None if level == "bits" else micro_batch,
    )  # fmt: skip
    (row,) = trained(job, size, exactness=level, shards=4).epochs
    assert (row["train_even"], row["train_odd"], row["odd"]) == (6.0, 3.0, 3.0)
    assert "even" not in row  # no such sample was held out
    assert "kinds" not in row


def weighted_by_kind(output, target):
    return {f"of {int(x) % 3}": (0.1 * one, 0.1 + float(one)) for x, one in zip(output, target, strict=True)}


def bits_of_metrics(context, job, size):
    run = kway.train(job, devices="auto", strategy="data", exactness="bits", shards=4, epochs=1)
    return [{n: v for n, v in row.items() if n not in ("seconds", "samples_per_s")} for row in run.epochs]


def test_w09_at_level_bits_figures_have_the_same_bits_on_any_number_of_devices(ranks):
    x = torch.arange(23.0, dtype=torch.float64)
    losses = torch.rand(23, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    job = job_of(x, losses, batch_size=7, metrics={"m": weighted_by_kind}, validation=(x, losses.flip(0)))
    rows = [found for size in (1, 2, 3, 4) for found in ranks.run(bits_of_metrics, job, size, size=size)]
    assert all(row == rows[0] for row in rows)
    assert {"of 0", "of 1", "of 2", "train_of 0"} <= rows[0][0].keys()


def reserved(output, target):
    return {"lr": 1.0} if float(output[0]) == 7 else {"fine": 1.0}


@pytest.mark.parametrize("size", [1, 2])
def test_w09_a_key_that_the_record_uses_is_refused_when_it_appears(trained, size, tmp_path):
    x = torch.tensor([4.0, 7.0], dtype=torch.float64)
    job = job_of(x, x, batch_size=1, shuffle=False, metrics={"m": reserved})
    with pytest.raises(
        kway.KwayError, match="a key 'lr' of metric 'm': that name has a meaning in the record"
    ):
        trained(job, size, out=tmp_path / "run")
    assert not (tmp_path / "run" / "train.json").exists()


class CountsPasses(nn.Module):
    """A buffer that moves in evaluation, too, and matters in training."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(2, 2)
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x):
        self.passes += 1
        return self.layer(x) * (1 + 0.1 * torch.sin(self.passes))


@pytest.mark.parametrize("exactness", ["math", "bits"])
def test_a_buffer_moves_once_a_batch_of_an_evaluation_on_any_number_of_devices(trained, exactness):
    draw = torch.Generator().manual_seed(0)
    job = kway.Job(
        model=CountsPasses, loss=nn.MSELoss(), optimizer=partial(torch.optim.SGD, lr=0.1), batch_size=10,
        data=(torch.rand(20, 2, generator=draw), torch.rand(20, 2, generator=draw)),
        validation=(torch.rand(14, 2, generator=draw), torch.rand(14, 2, generator=draw)),
    )  # fmt: skip
    runs = [trained(job, size, exactness=exactness, shards=4, epochs=2) for size in (1, 2, 3)]
    # Two batches of training and two of validation in each of two epochs.
    assert [float(run.model.passes) for run in runs] == [8.0] * 3
    if exactness == "bits":
        assert len({run.record.weights_sha256 for run in runs}) == 1
