"""Cases of runs that are gone on with: random numbers, and a loop of the user's own."""

import random
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

import kway
from kway.errors import UsageError


class Draws(nn.Module):
    """Draws from every generator there is: torch's, numpy's and Python's."""

    def __init__(self):
        super().__init__()
        self.layer, self.drop = nn.Linear(6, 2), nn.Dropout(0.5)

    def forward(self, x):
        factor = 1.0
        if self.training:
            factor += random.random() + float(np.random.rand())
        return self.layer(self.drop(x)) * factor


def job(**more):
    draw = torch.Generator().manual_seed(4)
    given = {
        "model": Draws,
        "loss": nn.MSELoss(),
        "optimizer": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        "data": (torch.rand(40, 6, generator=draw), torch.rand(40, 2, generator=draw)),
        "batch_size": 10,
        **more,
    }
    return kway.Job(**given)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_k06_masks_after_a_resume_are_those_of_the_run_that_went_on(ranks, tmp_path, size):
    given = {"devices": f"cpu:{size}", "epochs": 1, "ranks": ranks, "log_every": 1}
    losses = {"whole": [], "again": []}

    def into(name):
        return [lambda event, record: losses[name].append(record["loss"]) if event == "step" else None]

    kway.train(job(), callbacks=into("whole"), **given)
    out = tmp_path / "run"
    kway.train(job(), out=out, steps=2, checkpoint_every="2steps", **given)
    kway.train(job(), callbacks=into("again"), resume=out, **given)
    assert len(losses["whole"]) == 4
    assert losses["again"] == losses["whole"][2:]


def halves(session, folder, stop):
    """Train two epochs, or stop after a number of steps; save after every step."""
    begun = session.resume(folder)
    for epoch in range(begun.epoch, 2):
        for batch in session.batches(epoch, begun.step if epoch == begun.epoch else 0):
            session.step(batch)
            session.checkpoint(folder, epoch, batch.step + 1)
            if session.steps == stop:
                return None
    return begun.steps, {n: v.detach().clone() for n, v in session.model.state_dict().items()}


@pytest.mark.parametrize("size", [1, 2])
def test_a_loop_of_ones_own_is_gone_on_with(looped, tmp_path, size):
    whole = looped(job(), partial(halves, folder=str(tmp_path / "a"), stop=None), size)
    assert looped(job(), partial(halves, folder=str(tmp_path / "b"), stop=6), size) == [None] * size
    again = looped(job(), partial(halves, folder=str(tmp_path / "b"), stop=None), size)
    for (_, expected), (begun, found) in zip(whole, again, strict=True):
        assert begun == 6
        for name, value in expected.items():
            assert torch.equal(found[name], value)


def test_a_loop_of_another_job_is_refused(looped, tmp_path):
    looped(job(), partial(halves, folder=str(tmp_path / "b"), stop=1), 1)
    with pytest.raises(UsageError, match="batch_size 10, now 5"):
        looped(job(batch_size=5), partial(halves, folder=str(tmp_path / "b"), stop=None), 1)


def test_another_optimizer_in_a_loop_of_ones_own_is_refused(looped, tmp_path):
    looped(job(), partial(halves, folder=str(tmp_path / "b"), stop=1), 1)
    other = job(optimizer=partial(torch.optim.SGD, lr=0.5, momentum=0.9))
    with pytest.raises(UsageError, match=r"lr 0\.1, now 0\.5"):
        looped(other, partial(halves, folder=str(tmp_path / "b"), stop=None), 1)


def test_a_loop_of_kways_cannot_go_on_from_a_checkpoint_of_ones_own(looped, tmp_path):
    looped(job(), partial(halves, folder=str(tmp_path / "b"), stop=1), 1)
    with pytest.raises(UsageError, match="own"):
        kway.train(job(), devices="cpu:1", epochs=1, out=tmp_path / "run", resume=tmp_path / "b")


class Breaks(nn.MSELoss):
    def forward(self, output, target):
        return super().forward(output, target) * torch.nan


def test_a_loop_of_ones_own_saves_nothing_after_a_loss_that_is_no_number(looped, tmp_path):
    with pytest.raises(kway.NonFiniteError):
        looped(job(loss=Breaks()), partial(halves, folder=str(tmp_path / "b"), stop=3), 1)
    assert not (tmp_path / "b").exists()
