"""Schedules that were counted in epochs: within the first one they take the learning rate away, and the run says so."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import kway

STEP, MANY, SMOOTH = lr_scheduler.StepLR, lr_scheduler.MultiStepLR, lr_scheduler.ExponentialLR


@pytest.mark.parametrize(
    ("schedule", "left"),
    [
        (partial(STEP, step_size=1, gamma=0.1), "1e-06"),
        (partial(MANY, milestones=[1, 2, 3], gamma=0.01), "1e-06"),
        (partial(SMOOTH, gamma=0.1), "1e-06"),
        (partial(STEP, step_size=3, gamma=0.1), ""),
        (partial(STEP, step_size=1, gamma=0.9), ""),
        (partial(MANY, milestones=[7, 8, 9], gamma=0.01), ""),
        (partial(SMOOTH, gamma=1.0), ""),
        (partial(lr_scheduler.CosineAnnealingLR, T_max=6), ""),
    ],
)
def test_a_schedule_that_leaves_nothing_of_the_rate_after_one_epoch_is_named(schedule, left):
    x, y = torch.ones(24, 2), torch.zeros(24, dtype=torch.int64)
    sgd = partial(torch.optim.SGD, lr=0.1)
    job = kway.Job(nn.Linear(2, 2), nn.CrossEntropyLoss(), sgd, (x, y), batch_size=4, schedule=schedule)
    run = kway.train(job, devices="cpu:1", epochs=1, echo=False)
    said = [line for line in run.record.notices if line.startswith("schedule: ")]
    assert len(said) == bool(left)
    if left:
        assert f"an epoch has 6: after the first epoch {left} of the learning rate is left" in said[0]
        assert run.record.epochs[-1]["lr"] == pytest.approx(0.1 * float(left), rel=0.01)
