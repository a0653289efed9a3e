"""Best, early stop and plateau: every decision is taken once, from one number that all ranks share."""

from functools import partial

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import kway


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


TRAIN = torch.tensor([[0.0, 0.0, 1.0]] * 2, dtype=torch.float64)
LEVELS = [("math", 1), ("math", 2), ("math", 3), ("loose", 2), ("bits", 1), ("bits", 2)]


def growing(held, **more):
    """Held-out samples ``a + b * w``, where w is 0 after the first step and grows by 1 a step."""
    held = torch.tensor([[a, b, 0.0] for a, b in held], dtype=torch.float64)
    more = {"batch_size": 2, "precision": "fp64", "validation": (held, held), **more}
    more = {"optimizer": partial(torch.optim.SGD, lr=1.0), "data": (TRAIN, TRAIN), **more}
    return kway.Job(model=Counter, loss=as_it_is, **more)


# Means of 2.0 and 1.5 where one rank sees 1 < 2.5; of 2.0, 2.5, 3.0 ... where one rank sees 3 > 2.5 > 2.
BETTER, WORSE = [(1.0, 1.5), (3.0, -2.5)], [(1.0, 1.5), (3.0, -0.5)]


@pytest.mark.parametrize(("level", "size"), LEVELS)
def test_h04_early_stop_waits_for_the_shared_number(trained, level, size):
    options = {"exactness": level, "shards": 4, "epochs": 6, "early_stop": "validation_loss"}
    run = trained(growing(BETTER), size, patience=1, **options)
    assert [row["validation_loss"] for row in run.epochs] == [2.0, 1.5, 1.0, 0.5, 0.0, -0.5]
    assert not run.record.stopped_early
    assert not any("stopped" in text for text in run.record.notices)
    for patience in (1, 3):
        run = trained(growing(WORSE), size, patience=patience, **options)
        assert [row["validation_loss"] for row in run.epochs] == [2.0 + 0.5 * k for k in range(patience + 1)]
        assert run.record.stopped_early
        assert run.record.steps == patience + 1
        assert run.model.w.item() == patience  # the weights of the last step, not of the best
        assert any(
            f"stopped early after epoch {patience + 1}, step {patience + 1}: validation_loss was not better "
            f"than 2 in {patience} validations" in text
            for text in run.record.notices
        )


@pytest.mark.parametrize("size", [1, 2])
def test_h04_within_an_epoch_and_together_with_best_and_plateau(trained, size, tmp_path):
    events = []
    job = growing(WORSE, data=(TRAIN.repeat(5, 1), TRAIN.repeat(5, 1)), schedule=plateau)
    run = trained(
        job, size, epochs=3, validate_every="1steps", early_stop="validation_loss", patience=2,
        save_best="validation_loss", out=tmp_path / "run", callbacks=[lambda name, _: events.append(name)],
    )  # fmt: skip
    # w = 0, 1, then 1.5 after a step at half the rate.
    assert (run.record.steps, run.record.stopped_early) == (3, True)
    assert run.model.w.item() == 1.5
    (row,) = run.epochs
    assert (row["steps"], row["samples"], row["validation_loss"], row["lr"]) == (3, 6, 2.75, 0.25)
    assert run.record.best == {"metric": "validation_loss", "value": 2.0, "epoch": 1, "step": 1}
    assert float(load_file(tmp_path / "run" / "best.safetensors")["w"]) == 0.0
    assert [name for name in events if name != "step"] == ["start", *["validation"] * 3, "epoch", "end"]


@pytest.mark.parametrize("validate_every", [1, "1steps"])
def test_h04_a_run_that_was_at_its_end_was_not_stopped(trained, validate_every):
    options = {"early_stop": "validation_loss", "patience": 1, "validate_every": validate_every}
    assert not trained(growing(WORSE), 2, epochs=2, **options).record.stopped_early
    assert not trained(growing(WORSE), 2, epochs=9, steps=2, **options).record.stopped_early
    assert trained(growing(WORSE), 2, epochs=3, **options).record.stopped_early


def shares(output, _):
    """The larger of the rank's samples above 2.6, if any: some ranks have no such figure."""
    return {"above": output[output > 2.6], **({"rank_loss": -output} if float(output[0]) != 3 else {})}


def test_h04_figures_of_a_metric_that_returns_several(trained):
    job = growing(WORSE, metrics={"m": shares})
    run = trained(job, 2, epochs=4, early_stop="m/rank_loss", patience=1, save_best="m/rank_loss")
    assert [row["rank_loss"] for row in run.epochs] == [-1.0, -2.5, -3.0, -3.5]
    assert run.record.best["metric"] == "m/rank_loss"
    assert run.record.best["value"] == -3.5
    run = trained(job, 2, epochs=4, early_stop="m/above", patience=1)
    assert [row["above"] for row in run.epochs] == [3.0, pytest.approx(float("nan"), nan_ok=True)]
    assert run.record.stopped_early


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("what", ["save_best", "early_stop"])
def test_h04_a_figure_that_nobody_returned_is_an_error_of_all_ranks(trained, what, size):
    with pytest.raises(kway.KwayError, match=r"unknown validation figure 'm/belo'.*above, .*validation_loss"):
        trained(growing(WORSE, metrics={"m": shares}), size, **{what: "m/belo"})


@pytest.mark.parametrize("what", ["save_best", "early_stop"])
def test_h04_what_cannot_be_judged_is_refused_before_anything_starts(what):
    job = growing(WORSE, metrics={"m": shares})
    for name in ("above", "mm/above", "m/", "loss", ""):
        with pytest.raises(
            kway.UsageError, match=r"unknown validation figure .*known are m, validation_loss"
        ):
            kway.train(job, devices="cpu:2", **{what: name})
    with pytest.raises(kway.UsageError, match=f"{what}='m' without validation data"):
        kway.train(growing(WORSE, validation=None), devices="cpu:2", **{what: "m"})
    with pytest.raises(kway.UsageError, match="patience=0"):
        kway.train(job, devices="cpu:2", early_stop="m", patience=0)
    with pytest.raises(
        kway.UsageError, match=r'patience=1 without early_stop: .*; name a figure: early_stop="va'
    ):
        kway.train(job, devices="cpu:2", patience=1)


class Falls(nn.Module):
    """w grows by the learning rate a step, and with it the loss of the second sample, not that of the first."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.tensor(0.0, dtype=torch.float64))

    def forward(self, x):
        return x - self.w + self.w.detach() * x * 2


@pytest.mark.parametrize(("level", "size"), LEVELS)
def test_h04_a_plateau_without_held_out_data_reads_the_training_loss(trained, level, size):
    # Losses x - w + 2 w x of x = (0, 2) have the mean 1 + w, while the first rank by itself sees -w fall.
    x = torch.tensor([0.0, 2.0], dtype=torch.float64)
    job = kway.Job(
        model=Falls, loss=as_it_is, optimizer=partial(torch.optim.SGD, lr=1.0), data=(x, x), batch_size=2,
        precision="fp64", schedule=plateau, shuffle=False,
    )  # fmt: skip
    run = trained(job, size, epochs=4, exactness=level, shards=2)
    assert [row["train_loss"] for row in run.epochs] == [1.0, 2.0, 3.0, 3.5]
    assert [row["lr"] for row in run.epochs] == [1.0, 0.5, 0.25, 0.125]
