"""A schedule that only steps trains, and is refused where a checkpoint would have to hold where it is."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ChainedScheduler, StepLR

import kway

X, Y = torch.randn(8, 3, generator=torch.Generator().manual_seed(0)), torch.zeros(8, 1)


class Halves:
    """Halves the rate with each step."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def step(self):
        for group in self.optimizer.param_groups:
            group["lr"] /= 2


class Around(Halves):
    """Has what it lacks from torch's own scheduler in it."""

    def __init__(self, optimizer):
        self.own = StepLR(optimizer, 1, 0.5)
        super().__init__(optimizer)

    def step(self):
        self.own.step()

    def __getattr__(self, name):
        return getattr(self.own, name)


def chained(optimizer):
    parts = ChainedScheduler([StepLR(optimizer, 1)])
    parts._schedulers.append(Halves(optimizer))
    return parts


def job(schedule):
    sgd = partial(torch.optim.SGD, lr=0.5)
    given = {"loss": nn.MSELoss(), "optimizer": sgd, "data": (X, Y), "batch_size": 4, "schedule": schedule}
    return kway.Job(model=partial(nn.Linear, 3, 1), **given)


def train(schedule, **more):
    return kway.train(job(schedule), **{"devices": "cpu:1", "epochs": 1, "echo": False, **more})


def made(optimizer):
    return Halves(optimizer)


@pytest.mark.parametrize("schedule", [Halves, made, chained])
@pytest.mark.parametrize(
    "more",
    [{"checkpoint_every": 1}, {"resume": True}, {"checkpoint_every": 1, "lr_scale": "linear"}],
    ids=["writes", "reads", "scaled"],
)
def test_one_that_only_steps_is_refused_with_checkpoints_before_anything_starts(
    schedule, more, tmp_path, leftovers
):
    more = {"batch_size_per_device": 4, **more} if "lr_scale" in more else more
    for devices in ("cpu:1", "cpu:2"):
        with pytest.raises(kway.UsageError, match=r"type Halves without state_dict.*; give it both"):
            train(schedule, out=tmp_path / "run", devices=devices, **more)
    assert not leftovers()
    assert not (tmp_path / "run").exists()


def test_without_checkpoints_it_trains_and_another_that_has_its_state_elsewhere_goes_on(tmp_path):
    rates = [row["lr"] for row in train(Halves, epochs=2).epochs]
    assert rates == [0.125, 0.03125]
    kept = {"checkpoint_every": 1, "out": tmp_path / "run"}
    assert [row["lr"] for row in train(Around, **kept).epochs] == rates[:1]
    gone_on = train(Around, epochs=2, resume=tmp_path / "run")
    assert [row["lr"] for row in gone_on.epochs] == rates


def test_a_loop_of_ones_own_says_so_where_it_would_save_it(tmp_path):
    with kway.parallel(job(Halves), devices="cpu:1") as p:
        for batch in p.batches(0):
            p.step(batch)
        with pytest.raises(kway.UsageError, match="type Halves without state_dict"):
            p.checkpoint(tmp_path, 1)
