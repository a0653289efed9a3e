"""Schedules whose functions keep something: what can change of it is saved, and functions are the job's."""

from functools import cache, lru_cache, partial

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import kway
from kway.errors import UsageError

X, Y = torch.randn(40, 5, generator=torch.Generator().manual_seed(3)), torch.arange(40) % 3


def power(base, step):
    return base**step


def then_fixed(schedule, optimizer):
    return lr_scheduler.SequentialLR(optimizer, [schedule, lr_scheduler.ConstantLR(optimizer)], [3])


def train(schedule, out=None, **more):
    sgd = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
    job = kway.Job(
        partial(nn.Linear, 5, 3), nn.CrossEntropyLoss(), sgd, (X, Y), batch_size=10, schedule=schedule
    )
    given = {"devices": "cpu:1", "epochs": 1, "tune": False, "echo": False, **more}
    return kway.train(job, out=out, checkpoint_every=None if out is None else 1, **given)


class Warming:
    def __init__(self):
        self.calls, self.rate, self.kind = 0, lambda step: 0.9**step, float
        # Of nothing but functions: the job brings them.
        self.parts, self.by_name, self.none = [self.rate, (float, self.rate)], {"rate": self.rate}, []

    def __call__(self, step):
        self.calls += 1
        return self.kind(self.parts[1][1](step) + 0 * self.by_name["rate"](step)) + sum(self.none)


@pytest.mark.parametrize("wrap", [lambda schedule, optimizer: schedule, then_fixed])
@pytest.mark.parametrize("function", [lru_cache(partial(power, 0.9)), cache(lambda step: 0.9**step), Warming])
def test_a_schedule_of_a_cached_function_or_an_object_that_holds_one_goes_on(tmp_path, function, wrap):
    def schedule(optimizer):
        made.append(function() if function is Warming else function)
        return wrap(lr_scheduler.LambdaLR(optimizer, made[-1]), optimizer)

    made = []
    whole = train(schedule, epochs=2)
    calls = getattr(made[-1], "calls", None)
    train(schedule, tmp_path / "run")
    gone_on = train(schedule, tmp_path / "more", epochs=2, resume=tmp_path / "run")
    assert gone_on.record.weights_sha256 == whole.record.weights_sha256
    assert getattr(made[-1], "calls", None) == calls


def test_a_schedule_that_keeps_functions_beside_what_may_change_is_not_saved(tmp_path):
    def schedule(optimizer):
        rate = Warming()
        rate.parts = [*rate.parts, 3]
        return lr_scheduler.LambdaLR(optimizer, rate)

    with pytest.raises(UsageError, match="parts"):
        train(schedule, tmp_path / "run")
