"""Schedules that were counted in epochs: within the first one they take the learning rate away, and the run says so."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import kway

CHAINED, FIXED = lr_scheduler.ChainedScheduler, lr_scheduler.ConstantLR
STEP, MANY, SMOOTH = lr_scheduler.StepLR, lr_scheduler.MultiStepLR, lr_scheduler.ExponentialLR


def chained(optimizer):
    return CHAINED([STEP(optimizer, 1, gamma=0.1), FIXED(optimizer, factor=0.5, total_iters=1)])


def twice(optimizer):
    return CHAINED([STEP(optimizer, 1, gamma=0.1), SMOOTH(optimizer, gamma=0.1)])


def in_turn(first, second, milestone, optimizer):
    return lr_scheduler.SequentialLR(optimizer, [first(optimizer), second(optimizer)], [milestone])


tenth, fixed = partial(SMOOTH, gamma=0.1), partial(FIXED, factor=1.0)


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
        (chained, "1e-06"),
        (twice, "1e-12"),
        (partial(in_turn, fixed, tenth, 1), "1e-05"),
        (partial(in_turn, tenth, fixed, 50), "1e-06"),
        (partial(in_turn, fixed, tenth, 3), ""),
        (partial(in_turn, tenth, fixed, 5), ""),
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


def test_a_run_that_ends_before_the_rate_is_gone_hears_nothing():
    x, y = torch.ones(24, 2), torch.zeros(24, dtype=torch.int64)
    sgd = partial(torch.optim.SGD, lr=0.1)
    job = kway.Job(nn.Linear(2, 2), nn.CrossEntropyLoss(), sgd, (x, y), batch_size=4, schedule=tenth)
    for steps, said in ((3, []), (5, ["after 5 steps 1e-05 of the learning rate is left"])):
        run = kway.train(job, devices="cpu:1", epochs=1, steps=steps, echo=False)
        found = [line for line in run.record.notices if line.startswith("schedule: ")]
        assert len(found) == len(said)
        assert all(text in line for text, line in zip(said, found, strict=True))


def test_a_rate_that_grows_beyond_all_numbers_is_none_that_fades():
    x, y = torch.ones(400, 2), torch.zeros(400, dtype=torch.int64)
    sgd = partial(torch.optim.SGD, lr=0.0)
    grows = partial(SMOOTH, gamma=10.0)
    job = kway.Job(nn.Linear(2, 2), nn.CrossEntropyLoss(), sgd, (x, y), batch_size=1, schedule=grows)
    run = kway.train(job, devices="cpu:1", epochs=1, echo=False)
    assert not [line for line in run.record.notices if line.startswith("schedule: ")]
