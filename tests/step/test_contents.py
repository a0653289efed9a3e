"""What is changed between recorded steps inside of what a module or a function holds, and how often it may be."""

import logging
import time
from argparse import Namespace
from collections import OrderedDict, UserDict, deque
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from tests.step.recorded import Net, Scaled, after, opened, share
from torch import nn

from kway.step.attributes import HostState
from kway.step.contents import Contents, Root
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


GLOBAL = nn.SmoothL1Loss()


def reading(output, target):
    return GLOBAL(output, target)


def looking(*values):
    return Contents([Root(value, str) for value in values])


def around(module):
    return lambda output, target: 2 * module(output, target)


@dataclass(slots=True)
class Slots:
    scale: float = 1.0


class Table(list):
    """A list that holds more than its entries."""

    def __init__(self, *entries):
        super().__init__(entries)
        self.scale = 1.0


def with_options():
    def loss(output, target, weights={"a": 1.0}, *, more={"b": 1.0}):  # noqa: B006 - it is changed below
        return output * loss.scale * weights["a"] * more["b"]

    loss.scale = 1.0
    return loss


def holding(value):
    config = Config()
    config.held = value
    return config


def content(function):
    return function.__closure__[0].cell_contents


# What holds it, the change, and where it is said to be.
HELD = {
    "torch's, in a closure": (
        lambda: around(nn.LeakyReLU()),
        lambda held: setattr(content(held), "negative_slope", 3.0),
        "module.negative_slope",
    ),
    "torch's, in a list": (
        lambda: [nn.LeakyReLU()], lambda held: setattr(held[0], "negative_slope", 3.0), "[0].negative_slope",
    ),
    "torch's, in an object": (
        lambda: holding(nn.LeakyReLU()),
        lambda held: setattr(held.held, "negative_slope", 3.0),
        "held.negative_slope",
    ),
    "torch's, deep in torch's": (
        lambda: around(nn.Sequential(nn.Sequential(nn.LeakyReLU()))),
        lambda held: setattr(content(held)[0][0], "negative_slope", 3.0),
        "module.0.0.negative_slope",
    ),
    "torch's, a global": (lambda: reading, lambda held: setattr(GLOBAL, "beta", 3.0), "GLOBAL.beta"),
    "namespace": (lambda: Namespace(scale=1.0), lambda held: setattr(held, "scale", 3.0), "scale"),
    "user dict": (lambda: UserDict(scale=1.0), lambda held: held.update(scale=3.0), "data['scale']"),
    "ordered dict": (lambda: OrderedDict({5: 1.0}), lambda held: held.update({5: 3.0}), "[5]"),
    "deque": (lambda: deque([0.0, 1.0]), lambda held: held.__setitem__(1, 3.0), "[1]"),
    "slots": (lambda: [Slots()], lambda held: setattr(held[0], "scale", 3.0), "[0].scale"),
    "derived list": (lambda: Table(1.0), lambda held: held.__setitem__(0, 3.0), "[0]"),
    "attribute of one": (lambda: Table(1.0), lambda held: setattr(held, "scale", 3.0), "scale"),
    "attribute of a function": (with_options, lambda held: setattr(held, "scale", 3.0), "scale"),
    "defaults": (with_options, lambda held: setattr(held, "__defaults__", ({"a": 3.0},)), "__defaults__"),
    "in a default": (with_options, lambda held: held.__defaults__[0].update(a=3.0), "[0]['a']"),
    "keyword defaults": (
        with_options, lambda held: held.__kwdefaults__["more"].update(b=3.0), "['more']['b']",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("make", "change", "place"), HELD.values(), ids=HELD)
def test_what_is_changed_in_what_is_held_is_seen_and_named(make, change, place):
    held = make()
    look = looking(held)
    assert look.unchanged()
    assert look.change() is None
    change(held)
    assert not look.unchanged()
    assert look.change() == place


class Counting(nn.Module):
    calls = 0

    def forward(self, output, target):
        self.calls = self.calls + 1
        return nn.functional.cross_entropy(output, target, reduction="none") * self.calls


def test_a_model_that_holds_much_hides_nothing_of_a_loss():
    model = Net()
    model.table = [[0.0] * 250 for _ in range(20)]
    _, graphed, recorder = opened(model, optimizer=partial(torch.optim.SGD, lr=0.1), loss=Counting())
    for step in range(5):
        graphed.run(share(step), step)
    assert recorder.made == []
    assert "module.calls) changes from one step to the next" in graphed.notices[0]


def raising(*names, base=object, **options):
    def raises(self, *_):
        raise RuntimeError("not to be asked")

    return type("Raising", (base,), dict.fromkeys(names, raises) | options)()


REFUSES = property(lambda self: 1 / 0)
# A dict of them, so that the model asks none of them itself.
SHY = {
    "attribute": lambda: raising("__getattr__"),
    "slots": lambda: raising("__getattr__", "__getattribute__", __slots__=()),
    "class": lambda: raising(__class__=REFUSES),
    "list": lambda: raising("__len__", "__iter__", "__bool__", "__getitem__", base=list),
    "dict": lambda: raising("__len__", "__iter__", "values", "keys", "items", base=dict),
    "key": lambda: {raising("__repr__", "__str__"): 1.0},
    "equal": lambda: raising("__eq__", "__repr__"),
    "huge": lambda: 10**5000,
}


@pytest.mark.parametrize("make", SHY.values(), ids=SHY)
def test_what_raises_when_it_is_asked_is_not_asked(make):
    engine, graphed, recorder = opened(Net(), optimizer=partial(torch.optim.SGD, lr=0.1))
    engine.model.held = {"own": make()}
    after(graphed, 5, lambda: engine.model.held.update(own=make()))
    assert graphed.notices == []
    made = [each.replays for each in recorder.made]
    assert made == ([7] if make is SHY["huge"] else [2, 2])


def test_what_cannot_be_looked_at_is_named_once_and_its_steps_taken_as_they_are():
    engine, graphed, recorder = opened(Net(), optimizer=partial(torch.optim.SGD, lr=0.1))
    engine.model.held = [raising(__dict__=REFUSES)]
    for step in range(6):
        graphed.run(share(step, rows=6 - step % 2), step)
    assert recorder.made == []
    assert len(graphed.notices) == 1
    assert "'held[0]' of the model cannot be looked at (ZeroDivisionError)" in graphed.notices[0]


def test_what_the_host_keeps_is_looked_at_as_far_as_between_steps():
    model = Net()
    model.held = [list(range(3_000_000)), [list(range(200)) for _ in range(200)]]
    begun = time.perf_counter()
    state = HostState(model, [lambda: model.held])
    assert state.change() is None
    assert time.perf_counter() - begun < 0.5
    model.held[0].append(1)
    assert state.change() == "'held[0]' of the model changes from one step to the next"


def test_the_host_keeps_what_a_set_holds():
    model = Net()
    model.met = {1}
    state = HostState(model)
    model.met.add(2)
    assert state.change() == "'met' of the model changes from one step to the next"


def test_what_is_looked_at_between_steps_has_an_end():
    large, deep = dict.fromkeys(range(10_000), 0), [[[[[0]]]]]
    loop: list = [large, deep]
    loop.append(loop)
    look = looking(loop, logging.getLogger("kway.some"), torch, lambda: large)
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


@pytest.mark.parametrize(
    ("change", "name"), [(annealed, "'scale' of the model keeps"), (smoothed, "attributes of the loss, keep")]
)
def test_what_keeps_changing_between_steps_ends_recording_and_is_named(change, name):
    loss = nn.CrossEntropyLoss()
    engine, graphed, recorder = opened(Scaled(), optimizer=partial(torch.optim.SGD, lr=0.1), loss=loss)
    graphed = GraphedStep(engine._step, recorder, traced=False)
    for step in range(80):
        change(engine.model, loss, step)
        graphed.run(share(step), step)
    assert len(recorder.made) < 10
    assert f"{name} changing between them" in graphed.notices[0]


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
