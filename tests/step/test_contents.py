"""What is changed between recorded steps inside of what a module or a function holds, and how often it may be."""

import logging
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from tests.step.recorded import Net, Scaled, after, opened, share
from torch import nn

from kway.step.contents import Contents
from kway.step.graph import MOST_FORMS, GraphedStep


class Config:
    def __init__(self):
        self.scale = 1.0


def closing(factor):
    def scaled(x):
        return x * factor

    def change(value):
        nonlocal factor
        factor = value

    return scaled, change


class Holding(Net):
    """Scales by numbers that lie deeper than its attributes."""

    def __init__(self):
        super().__init__()
        self.table, self.numbers, self.config = {"a": {"scale": 1.0}}, [1.0], Config()
        self.space = SimpleNamespace(scale=1.0)
        self.scaled, self.change = closing(1.0)

    def forward(self, x):
        out = self.inner(x) * self.table["a"]["scale"] * self.numbers[0]
        return self.scaled(out * self.config.scale * self.space.scale)


INSIDE = {
    "dict": lambda model: model.table["a"].update(scale=3.0),
    "list": lambda model: model.numbers.__setitem__(0, 3.0),
    "object": lambda model: setattr(model.config, "scale", 3.0),
    "namespace": lambda model: setattr(model.space, "scale", 3.0),
    "closure": lambda model: model.change(3.0),
    "hook": lambda model: model.register_forward_hook(lambda module, args, output: output * 3.0) and None,
}


@pytest.mark.parametrize("change", INSIDE.values(), ids=INSIDE)
def test_what_is_changed_inside_of_what_a_module_holds_is_followed(change):
    engine, graphed, recorder = opened(Holding(), optimizer=partial(torch.optim.SGD, lr=0.1))
    after(graphed, 5, lambda: change(engine.model))
    assert [made.closed for made in recorder.made] == [True, False]
    assert [made.replays for made in recorder.made] == [2, 2]


class Weighed:
    def __init__(self):
        self.weight = 0.1


class Penalty(Weighed):
    def __call__(self, model):
        return self.weight * model.inner[0].weight.square().sum()


class Metric(Weighed):
    def __call__(self, output, target):
        return (output.argmax(1) == target) * self.weight


class Loss(Weighed):
    def __call__(self, output, target):
        return self.weight * nn.functional.cross_entropy(output, target, reduction="none")


@pytest.mark.parametrize(("name", "made"), [("penalty", Penalty()), ("loss", Loss()), ("metrics", Metric())])
def test_what_objects_around_a_model_hold_is_followed(name, made):
    options = {name: {"m": made} if name == "metrics" else made}
    _, graphed, recorder = opened(Net(), optimizer=partial(torch.optim.SGD, lr=0.1), **options)
    after(graphed, 5, lambda: setattr(made, "weight", made.weight + 1.0))
    assert [made.replays for made in recorder.made] == [2, 2]


def test_what_is_looked_at_between_steps_has_an_end():
    large, deep = dict.fromkeys(range(10_000), 0), [[[[[0]]]]]
    loop: list = [large, deep]
    loop.append(loop)
    look = Contents([loop, logging.getLogger("kway.some"), torch, lambda: large])
    assert look.unchanged()
    large[5] = deep[0][0][0][0][0] = 1
    logging.getLogger("kway.some").isEnabledFor(logging.DEBUG)
    assert look.unchanged()
    large[-1] = 0
    assert not look.unchanged()


def annealed(model, loss, step):
    model.scale = 0.99**step


def smoothed(model, loss, step):
    loss.label_smoothing = 0.2 * 0.99**step


@pytest.mark.parametrize("change", [annealed, smoothed])
def test_what_keeps_changing_between_steps_ends_recording_and_is_named(change):
    loss = nn.CrossEntropyLoss()
    engine, graphed, recorder = opened(Scaled(), optimizer=partial(torch.optim.SGD, lr=0.1), loss=loss)
    graphed = GraphedStep(engine._step, recorder, traced=False)
    for step in range(80):
        change(engine.model, loss, step)
        graphed.run(share(step), step)
    assert len(recorder.made) < 10
    assert "keep changing between them" in graphed.notices[0]


def test_what_changes_seldom_is_recorded_each_time():
    engine, graphed, recorder = opened(Scaled(), optimizer=partial(torch.optim.SGD, lr=0.1))
    for step in range(40 * 12):
        engine.model.scale = float(1 + step // 40)
        graphed.run(share(step), step)
    assert graphed.notices == []
    assert len(recorder.made) == 12


def test_forms_that_compiled_code_meets_once_come_to_an_end_and_are_named():
    engine, _, recorder = opened(Net(), optimizer=partial(torch.optim.SGD, lr=0.1))
    graphed = GraphedStep(engine._step, recorder, traced=False)
    for step in range(MOST_FORMS + 4):
        graphed.run(share(step, rows=4 + step), step)
    assert len(graphed._met) == MOST_FORMS
    assert any("forms" in text for text in graphed.notices)
