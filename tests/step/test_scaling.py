import math
import pickle
from functools import partial

import pytest
import torch
from tests.step.recorded import opened, share
from torch import nn

from kway.checkpoints.state import flatten, restore
from kway.errors import UsageError
from kway.step.scaling import LrScale, ScaledSchedule, advance, default_warmup, own_schedule, waits_for_figure

LINEAR = LrScale("linear", 4, 6)
SCHEDULES = {
    "none": None,
    "recursive": partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5),
    "closed": partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=lambda step: 1 / (1 + step)),
    "milestones": partial(torch.optim.lr_scheduler.MultiStepLR, milestones=[2, 5], gamma=0.1),
    "cosine": partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=9),
    "one cycle": partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=1.0, total_steps=12),
    "chained": lambda optimizer: torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.ConstantLR(optimizer, 0.5, 3),
            torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
        ],
        [3],
    ),
}


def optimizer(rates=(0.1, 0.02), cls=torch.optim.SGD):
    groups = [{"params": [nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates]
    return cls(groups)


def rates(found):
    return [float(group["lr"]) for group in found.param_groups]


def stepped(found, schedule, count):
    """Return the rates of ``count`` steps."""
    seen = []
    for _ in range(count):
        seen.append(rates(found))
        found.step()
        if schedule is not None:
            advance(schedule)
    return seen


def test_rules_are_those_of_their_sources():
    assert [LrScale("linear", k, 0).factor for k in (1, 2, 8)] == [1, 2, 8]
    assert [LrScale("sqrt", k, 0).factor for k in (1, 4, 8)] == [1, 2, math.sqrt(8)]
    # In equal steps, from the rate of one device on.
    assert [LINEAR.at(step) for step in (0, 1, 3, 6, 99)] == [1, 1.5, 2.5, 4, 4]
    assert LrScale("linear", 4, 0).at(0) == 4


def test_the_usual_warm_up_is_five_epochs_or_a_tenth_of_the_run():
    assert default_warmup(100, 9000) == 500
    assert default_warmup(100, 1000) == 100
    assert default_warmup(3, 30) == 3
    assert default_warmup(None, 25) == 3


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_sees_the_rates_of_one_device_and_the_optimizer_the_scaled_ones(name):
    plain, scaled = optimizer(), optimizer()
    own = SCHEDULES[name]
    alone = stepped(plain, None if own is None else own(plain), 11)
    grown = stepped(scaled, ScaledSchedule(own, LINEAR)(scaled), 11)
    for step, (one, other) in enumerate(zip(alone, grown, strict=True)):
        assert other == [rate * LINEAR.at(step) for rate in one]


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("stopped", [3, 8])
def test_a_run_that_goes_on_has_the_same_rates(name, stopped):
    own = SCHEDULES[name]
    whole = optimizer()
    expected = stepped(whole, ScaledSchedule(own, LINEAR)(whole), 11)
    first = optimizer()
    schedule = ScaledSchedule(own, LINEAR)(first)
    stepped(first, schedule, stopped)
    saved = restore(*flatten(schedule.state_dict()))
    again = optimizer()
    other = ScaledSchedule(own, LrScale("linear", 4, 77))(again)
    again.load_state_dict(first.state_dict())
    other.load_state_dict(saved)
    assert other.scale.warmup_steps == 6
    assert stepped(again, other, 11 - stopped) == expected[stopped:]


def test_another_warm_up_that_is_named_is_refused():
    found = optimizer()
    saved = ScaledSchedule(None, LINEAR)(found).state_dict()
    with pytest.raises(UsageError, match="a warm-up of 7 steps for a run that began with one of 6"):
        ScaledSchedule(None, LrScale("linear", 4, 7, is_given=True))(found).load_state_dict(saved)


def test_a_schedule_that_waits_for_figures_does_so_while_steps_warm_up():
    found = optimizer((0.1,))
    own = partial(torch.optim.lr_scheduler.ReduceLROnPlateau, factor=0.5, patience=0)
    schedule = ScaledSchedule(own, LINEAR)(found)
    assert waits_for_figure(schedule)
    stepped(found, schedule, 3)
    assert rates(found) == [0.1 * 2.5]
    for figure in (1.0, 2.0):  # worse: the rate is halved
        schedule.step(figure)
    assert rates(found) == [0.05 * 2.5]
    stepped(found, schedule, 5)
    assert rates(found) == [0.05 * 4]


def test_a_rate_that_is_a_tensor_stays_that_tensor():
    held = torch.tensor(0.1, dtype=torch.float64)
    found = torch.optim.Adam([nn.Parameter(torch.zeros(1))], lr=held, foreach=False)
    schedule = ScaledSchedule(None, LINEAR)(found)
    stepped(found, schedule, 3)
    assert found.param_groups[0]["lr"] is held
    assert held.item() == 0.1 * 2.5


def test_a_group_that_comes_later_is_scaled_too():
    found = optimizer((0.1,))
    schedule = ScaledSchedule(None, LINEAR)(found)
    found.add_param_group({"params": [nn.Parameter(torch.zeros(1))], "lr": 0.2})
    advance(schedule)
    assert rates(found) == [0.1 * 1.5, 0.2 * 1.5]


def test_it_travels_and_says_what_is_in_it():
    schedule = ScaledSchedule(SCHEDULES["recursive"], LINEAR)
    found = optimizer((0.1,))
    assert stepped(found, pickle.loads(pickle.dumps(schedule))(found), 2) == [[0.1], [0.05 * 1.5]]
    assert own_schedule(schedule) == (SCHEDULES["recursive"], LINEAR)
    assert own_schedule(None) == (None, None)


def test_a_schedule_that_makes_none_is_told():
    with pytest.raises(UsageError, match="the schedule is of type int"):
        ScaledSchedule(lambda optimizer: 3, LINEAR)(optimizer())


def test_recorded_steps_follow_the_warm_up():
    sgd = partial(torch.optim.SGD, lr=0.1)
    schedule = ScaledSchedule(None, LrScale("linear", 4, 4))
    engine, graphed, recorder = opened(nn.Linear(3, 2), optimizer=sgd, schedule=schedule)
    found = []
    for step in range(7):
        before = engine.model.weight.detach().clone()
        graphed.run(share(step), step)
        found.append(((before - engine.model.weight.detach()) / engine.model.weight.grad).median().item())
    assert recorder.made[0].replays == 4
    assert found == pytest.approx([0.1, 0.175, 0.25, 0.325, 0.4, 0.4, 0.4], rel=1e-4)
