"""A run does not go on with another schedule than it began with, also where only the made one shows that it is."""

import json
import math
import random
import shutil
import time
from functools import partial
from hashlib import sha256

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import kway
from kway.errors import UsageError
from kway.training.pure import is_pure

G = torch.Generator().manual_seed(3)
X, Y = torch.randn(40, 5, generator=G), torch.arange(40) % 3


def one_cycle(**more):
    return lambda optimizer: lr_scheduler.OneCycleLR(optimizer, **{"max_lr": 0.05, "total_steps": 40, **more})


def two_parts(factor):
    def make(optimizer):
        parts = [lr_scheduler.LinearLR(optimizer, factor), lr_scheduler.ExponentialLR(optimizer, 0.9)]
        return lr_scheduler.SequentialLR(optimizer, parts, [3])

    return make


def by_function(base, wrap=lambda schedule, optimizer: schedule):
    """Rates of a function that finds its base around it."""
    return lambda optimizer: wrap(lr_scheduler.LambdaLR(optimizer, lambda step: base**step), optimizer)


def then_fixed(schedule, optimizer):
    return lr_scheduler.SequentialLR(optimizer, [schedule, lr_scheduler.ConstantLR(optimizer)], [3])


def power(base, step):
    return base**step


def of_partial(base):
    return lambda optimizer: lr_scheduler.MultiplicativeLR(optimizer, partial(power, base))


def cyclic(base):
    return lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.01, 0.05, 4, scale_fn=partial(power, base))


def job(schedule, lr=0.05, **more):
    sgd = partial(torch.optim.SGD, lr=lr, momentum=0.9)
    given = {"loss": nn.CrossEntropyLoss(), "optimizer": sgd, "data": (X, Y), "batch_size": 8, **more}
    return kway.Job(partial(nn.Linear, 5, 3), schedule=schedule, **given)


def train(schedule, out=None, *, lr=0.05, **more):
    given = {"devices": "cpu:1", "epochs": 1, "tune": False, **more}
    return kway.train(job(schedule, lr), out=out, checkpoint_every=None if out is None else 1, **given)


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    found = {}
    for name, schedule in {
        "cycle": one_cycle(),
        "parts": two_parts(0.5),
        "steps": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [2, 4]),
        "figure": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=2),
        "function": by_function(0.9),
        "within": by_function(0.9, then_fixed),
        "partial": of_partial(0.9),
        "cyclic": cyclic(0.9),
    }.items():
        found[name] = tmp_path_factory.mktemp("begun") / "run"
        train(schedule, found[name])
    return found


@pytest.mark.parametrize(
    ("first", "schedule", "said"),
    [
        ("cycle", one_cycle(total_steps=48), "another schedule: total_steps 40, now 48; "),
        ("cycle", one_cycle(pct_start=0.9), "another schedule: _schedule_phases[0].end_step 11.0, now 35.0: "),
        ("cycle", one_cycle(anneal_strategy="linear"), "another schedule: _anneal_func_type cos, now linear: "),
        ("cycle", one_cycle(max_lr=0.1), "another schedule: max_lr 0.05, now 0.1; min_lr 2e-07, now 4e-07: "),
        ("cycle", one_cycle(div_factor=50), "another schedule: initial_lr 0.002, now 0.001; min_lr 2e-07, now 1e-07: "),
        ("cycle", one_cycle(max_momentum=0.9), "another schedule: max_momentum 0.95, now 0.9: "),
        ("cycle", two_parts(0.5), "schedule <lambda>, now make; schedule: OneCycleLR, now SequentialLR: "),
        ("parts", two_parts(0.25), "another schedule: _schedulers[0].start_factor 0.5, now 0.25: "),
        (
            "steps",
            lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [2, 5]),
            "another schedule: milestones[4] 1, now none; milestones[5] none, now 1: ",
        ),
        (
            "figure",
            lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=5),
            "another schedule: patience 2, now 5: ",
        ),
        ("function", by_function(0.5), "another schedule: lr_lambdas[0](1) 0.9, now 0.5; lr_lambdas[0](2) 0.81, now "),
        ("within", by_function(0.5, then_fixed), "another schedule: _schedulers[0].lr_lambdas[0](1) 0.9, now 0.5; "),
        ("partial", of_partial(0.5), "another schedule: lr_lambdas[0](1) 0.9, now 0.5; "),
        ("cyclic", cyclic(0.5), "another schedule: scale_fn(1) 0.9, now 0.5; "),
    ],
)  # fmt: skip
def test_another_schedule_is_refused_by_what_it_is_when_it_is_made(begun, tmp_path, first, schedule, said):
    with pytest.raises(UsageError) as caught:
        train(schedule, tmp_path / "more", resume=begun[first], epochs=2)
    assert said in str(caught.value)
    assert not (tmp_path / "more").exists()


def test_schedule_and_optimizer_are_told_apart_and_told_together(begun):
    with pytest.raises(UsageError) as caught:
        train(one_cycle(total_steps=48), lr=0.1, resume=begun["cycle"], epochs=2)
    assert (
        "another optimizer and schedule: optimizer: lr 0.05, now 0.1; schedule: total_steps 40, now 48; "
        in str(caught.value)
    )
    with pytest.raises(UsageError) as caught:
        kway.train(job(one_cycle(pct_start=0.9), seed=3), devices="cpu:1", epochs=2, resume=begun["cycle"])
    assert "another job: seed 0, now 3; schedule: _schedule_phases[0].end_step 11.0, now 35.0: " in str(
        caught.value
    )


def in_a_table(optimizer):
    """Knows few rates only."""
    return lr_scheduler.LambdaLR(optimizer, lambda step: [1, 0.9, 0.8, 0.7, *[0.5] * 12][step])


def test_a_function_that_fails_beyond_its_end_is_asked_before_it(tmp_path):
    train(in_a_table, tmp_path / "run")
    assert train(in_a_table, resume=tmp_path / "run", epochs=2).record.resumed_from_step == 5


def by_numpy():
    draw = np.random.default_rng(0)
    return lambda step: draw.random()


def by_count():
    calls = 0

    def rate(step):
        nonlocal calls
        calls += 1
        return 0.9 ** (calls - 1)

    return rate


def by_iterator():
    rates = iter([0.9**step for step in range(100)])
    return lambda step: next(rates)


def by_list():
    table = [1.0]

    def rate(step):
        table.append(table[-1] * 0.9)
        return table[-2]

    return rate


def by_attribute():
    def rate(step):
        rate.calls += 1
        return 0.9 ** (rate.calls - 1)

    rate.calls = 0
    return rate


def by_table():
    table = {step: 0.9**step for step in range(100)}

    def rate(step):
        return table.pop(step)

    return rate


@pytest.mark.parametrize("made", [by_numpy, by_count, by_iterator, by_list, by_attribute, by_table])
def test_a_function_that_another_call_would_change_is_told_by_its_code(tmp_path, made):
    def schedule(optimizer):
        return lr_scheduler.LambdaLR(optimizer, made())

    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.05)
    plain = schedule(optimizer)
    for _ in range(5):
        optimizer.step()
        plain.step()
    first = train(schedule, tmp_path / "run")
    # It was called as often as by plain torch.
    assert first.epochs[-1]["lr"] == plain.get_last_lr()[0]
    if made is not by_table:
        assert train(schedule, resume=tmp_path / "run", epochs=2).record.resumed_from_step == 5


FACTOR, TABLE, HALVES = 0.5, (1.0, 0.5), [1.0, 0.5]


def of_others(step):
    return FACTOR * max(TABLE) * math.cos(step) + power(0.9, step) + sum(0.1 * each for each in range(3))


def looked_up(step):
    return HALVES[step % 2]


def made_of_numpy(step):
    return float(np.exp(-step))


def of_numpys_draws(step):
    return np.random.rand()


def printing(step):
    print(step)
    return 1.0


@pytest.mark.parametrize(
    ("function", "can"),
    [
        (lambda step: 0.9**step, True),
        (partial(power, 0.9), True),
        (of_others, True),
        (made_of_numpy, True),
        (of_numpys_draws, False),
        (looked_up, False),
        (printing, False),
        (partial(power, [0.9]), False),
        (random.random, False),
        (nn.Identity(), False),
    ],
)
def test_only_functions_that_leave_no_trace_are_asked(function, can):
    assert is_pure(function) == can


SAME = {
    "cycle": one_cycle(),
    "parts": two_parts(0.5),
    "function": by_function(0.9),
    "within": by_function(0.9, then_fixed),
}


@pytest.mark.parametrize("first", SAME)
def test_the_same_one_goes_on_for_longer(begun, first):
    schedule = SAME[first]
    on, whole = train(schedule, resume=begun[first], epochs=3), train(schedule, epochs=3)
    assert on.record.resumed_from_step == 5
    assert on.record.weights_sha256 == whole.record.weights_sha256


def test_a_loop_of_ones_own_is_held_to_it_as_well(tmp_path):
    with kway.parallel(job(one_cycle()), devices="cpu:1") as p:
        p.checkpoint(tmp_path / "kept", 0)
    with (
        kway.parallel(job(one_cycle(total_steps=48)), devices="cpu:1") as p,
        pytest.raises(UsageError, match="another schedule: total_steps 40, now 48"),
    ):
        p.resume(tmp_path / "kept")


def without_rates(manifest):
    names = [name for name in manifest["parts"]["beginning"]["schedule"] if name.endswith(")")]
    for name in names:
        del manifest["parts"]["beginning"]["schedule"][name]
    return len(names)


@pytest.mark.parametrize("first", ["function", "within"])
def test_a_checkpoint_that_did_not_ask_a_function_is_gone_on_with(begun, tmp_path, first):
    path = shutil.copytree(begun[first] / "checkpoints" / "step-5", tmp_path / "step-5") / "manifest.json"
    body = json.loads(path.read_bytes())
    assert without_rates(body) > 9
    del body["sha256"]
    body["sha256"] = sha256(json.dumps(body, indent=1).encode() + b"\n").hexdigest()
    path.write_bytes(json.dumps(body, indent=1).encode() + b"\n")
    assert train(SAME[first], resume=path.parent, epochs=2).record.resumed_from_step == 5


def test_a_checkpoint_that_knows_nothing_of_it_is_judged_as_before(begun, tmp_path):
    path = shutil.copytree(begun["cycle"] / "checkpoints" / "step-5", tmp_path / "step-5") / "manifest.json"
    body = json.loads(path.read_bytes())
    del body["parts"]["beginning"], body["sha256"]
    body["sha256"] = sha256(json.dumps(body, indent=1).encode() + b"\n").hexdigest()
    path.write_bytes(json.dumps(body, indent=1).encode() + b"\n")
    assert train(one_cycle(), resume=path.parent, epochs=2).record.resumed_from_step == 5
    with pytest.raises(UsageError, match=r"another optimizer: lr 0\.00.*, now"):
        train(one_cycle(max_lr=0.1), resume=path.parent, epochs=2)


def test_a_schedule_of_ones_own_without_a_state_trains_where_nothing_is_saved():
    class Halved:
        def __init__(self, optimizer):
            self.optimizer = optimizer

        def step(self):
            self.optimizer.param_groups[0]["lr"] /= 2

    assert train(Halved).epochs[-1]["lr"] == 0.05 / 2**5


@pytest.mark.parametrize(
    ("asked", "length", "way"),
    [
        ({"epochs": 3}, 6, r"7\.|epochs=2 \(--epochs\), or steps=6"),
        ({"epochs": 3}, 7, r"use steps=7 \(--steps\), or make it for 9 steps"),
        ({"epochs": 9, "steps": 8}, 7, r"a run of 8, which is 9 epochs of 3 steps"),
    ],
)
def test_a_schedule_that_is_shorter_than_the_run_is_refused_before_the_first_step(asked, length, way):
    def rates(optimizer):
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=length)

    seen = []
    job = kway.Job(
        model=nn.Linear(2, 2),
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        data=(torch.ones(12, 2), torch.zeros(12, dtype=torch.int64)),
        batch_size=4,
        schedule=rates,
    )
    with pytest.raises(kway.UsageError, match=rf"{length} steps in all \(total_steps\).*{way}"):
        kway.train(job, devices="cpu:1", echo=False, **asked)
    assert not [event for event in seen if event["event"] == "step"]
    run = kway.train(job, devices="cpu:1", echo=False, epochs=9, steps=length)
    assert run.record.steps == length


class Dated(lr_scheduler.LRScheduler):
    """Keeps when it was made."""

    def __init__(self, optimizer):
        self.made = time.time_ns()
        super().__init__(optimizer)

    def get_lr(self):
        return [rate / (1 + self.last_epoch) for rate in self.base_lrs]


@pytest.mark.parametrize("within", [False, True])
def test_what_a_schedule_of_the_user_s_keeps_of_its_process_does_not_matter(within, tmp_path):
    def schedule(optimizer):
        return lr_scheduler.SequentialLR(optimizer, [Dated(optimizer)], []) if within else Dated(optimizer)

    job = kway.Job(
        model=partial(nn.Linear, 5, 3),
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        data=(X, Y),
        batch_size=10,
        schedule=schedule,
    )
    common = {"devices": "cpu:1", "echo": False}
    kway.train(job, epochs=1, out=tmp_path / "first", checkpoint_every="1epochs", **common)
    run = kway.train(job, epochs=2, out=tmp_path / "second", resume=tmp_path / "first", **common)
    assert run.record.steps == 8
