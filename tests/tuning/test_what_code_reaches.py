"""What is kept for a job is not taken for one whose code, or anything that it calls, has changed."""

import logging
import sys
import types
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

import kway
from kway.training.parts import training_parts
from kway.tuning.code import MOST, code_of
from kway.tuning.kept import job_facts

X, Y = torch.randn(20, 4), torch.arange(20) % 2

SOURCE = """
import functools
from types import SimpleNamespace
import torch
from torch import nn
from torch.nn import functional as F

CONFIG = {{"by": {listed}}}
OPTIONS = SimpleNamespace(by={option})
SEEN = 0


class Deep:
    @classmethod
    def f(cls, x):
        return x * {class_method}


class Helper:
    times = {class_value}

    @staticmethod
    def f(x):
        return Deep.f(x) * {static_method}

    @property
    def half(self):
        return {property}


class Base(nn.Module):
    def more(self, x):
        return x * {base} * CONFIG["by"] * OPTIONS.by


@functools.cache
def cached():
    return {cached}


@torch.no_grad()
def decorated():
    return {decorated}


class Net(Base):
    def __init__(self):
        super().__init__()
        self.layer, self.helper, self.seen = nn.Linear(4, 2), Helper(), 0
        self.build()

    def build(self):
        self.depth = {attribute}

    def forward(self, x):
        global SEEN
        self.seen, SEEN = self.seen + 1, SEEN + 1
        return Helper.f(self.more(self.layer(x))) * self.depth * cached() * decorated()


def helper(output, target):
    return F.cross_entropy(output, target, reduction="none") * {called}


class Loss(nn.Module):
    def forward(self, output, target):
        return F.cross_entropy(output, target, reduction="none") * {loss_module}


def loss(output, target):
    return helper(output, target) * {loss}


class Optimizer(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_({optimizer})
        return super().step(closure)


def metric(output, target):
    return helper(output, target) + {metric}


def rate(step):
    return {schedule}


def schedule(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
"""
FIELDS = [
    "option",
    "listed",
    "class_method",
    "class_value",
    "static_method",
    "property",
    "base",
    "cached",
    "decorated",
    "attribute",
    "called",
    "loss_module",
    "loss",
    "optimizer",
    "metric",
    "schedule",
]


def written(name="of_the_user", **changes):
    module = types.ModuleType(name)
    exec(SOURCE.format(**{**dict.fromkeys(FIELDS, 1), **changes}), vars(module))
    return module


def facts(kind="loss", **changes):
    code = written(**changes)
    job = kway.Job(
        code.Net,
        code.Loss() if kind == "Loss" else code.loss,
        partial(code.Optimizer, lr=0.1),
        (X, Y),
        batch_size=5,
        metrics={"own": code.metric},
        schedule=code.schedule,
    )
    parts = training_parts(replace(job, validation=None))[0]
    return job_facts(job, code.Net(), parts, torch.device("cpu"))


@pytest.mark.parametrize("field", FIELDS)
def test_a_job_is_another_one_where_what_it_calls_has_changed(field):
    kind = "Loss" if field == "loss_module" else "loss"
    assert facts(kind) == facts(kind)
    assert facts(kind) != facts(kind, **{field: 2})


def test_what_a_loss_module_holds_counts():
    told = {
        code_of(each)
        for each in (
            nn.CrossEntropyLoss(),
            nn.CrossEntropyLoss(label_smoothing=0.1),
            nn.MSELoss(),
            nn.BCELoss,
        )
    }
    assert len(told) == 4


def test_how_far_an_object_got_is_no_part_of_its_code():
    code = written()
    model = code.Net()
    before = code_of(model)
    model(X)
    model.eval()
    assert code_of(model) == before
    model.depth = 2
    assert code_of(model) != before


def test_modules_of_the_user_are_followed_and_libraries_are_not(monkeypatch):
    names = {"helpers": written(), "torch": torch, "__name__": "script"}
    exec("def loss(o, t):\n    return helpers.loss(o, t) + torch.nn.functional.mse_loss(o, t)", names)
    before = code_of(names["loss"])
    names["helpers"] = written(called=2)
    changed = code_of(names["loss"])
    assert changed != before
    monkeypatch.setattr(torch.nn.functional, "mse_loss", lambda o, t: o)
    assert code_of(names["loss"]) == changed
    # As one that is installed has it: its version stands for it.
    installed = written("installed")
    vars(installed).update(__file__="/usr/lib/site-packages/installed.py", __version__="1")
    monkeypatch.setitem(sys.modules, "installed", installed)
    before = [code_of(each) for each in (installed.Deep, installed.helper)]
    monkeypatch.setitem(vars(installed), "__version__", "2")
    after = [code_of(each) for each in (installed.Deep, installed.helper)]
    assert not set(before) & set(after)
    before = code_of(installed.helper)
    monkeypatch.setattr(installed.helper, "__code__", written(called=2).helper.__code__)
    assert code_of(installed.helper) == before


def test_a_table_of_functions_and_what_a_partial_holds_count():
    names = {}
    exec(
        "def one(x):\n    return x\ndef two(x):\n    return -x\ndef loss(o, t):\n    return TABLE['f'](o)",
        names,
    )
    told = []
    for function in (names["one"], names["two"], partial(names["two"], 1), names["loss"]):
        names["TABLE"] = {"f": [function]}
        told.append(code_of(names["loss"]))
    assert len(set(told)) == 4


def test_circles_depth_and_much_of_it_end():
    names = {}
    lines = [f"def f{place}(x):\n    return f{(place + 1) % 3000}(x)" for place in range(3000)]
    exec("\n".join(lines), names)
    first = code_of(names["f0"])
    assert first == code_of(names["f0"])
    exec("def f2999(x):\n    return f0(x) + 1", names)
    assert code_of(names["f0"]) != first
    nested = []
    for _ in range(2 * MOST):
        nested = [nested, 1]
    assert code_of(nested)


def test_no_code_of_the_user_runs():
    class Odd:
        def __getattr__(self, name):
            raise AssertionError(name)

        def __repr__(self):
            raise AssertionError("repr")

        def __eq__(self, other):
            raise AssertionError("eq")

        __hash__ = None

    class Text(str):
        def __repr__(self):
            raise AssertionError("repr")

    holds = types.SimpleNamespace(odd=Odd(), text=Text("a"), log=logging.getLogger("a"))

    class HoldsOne:
        odd = Odd()

    for each in (lambda x: holds, Odd(), HoldsOne, partial(print, Odd())):
        assert code_of(each)


class Proxy:
    """Fails whatever it is asked, as objects do that stand for what is not there yet."""

    def fails(self, *_):
        raise RuntimeError("not now")

    __class__ = property(fails)
    __len__ = __iter__ = __bool__ = __getattr__ = fails


class Listed(list):
    def __len__(self):
        raise RuntimeError("not now")


PROXY, LISTED = Proxy(), Listed([1])


def asks():
    return PROXY, LISTED


def test_what_fails_when_it_is_asked_counts_by_its_class():
    assert code_of(asks) == code_of(asks)


def test_values_that_are_others_in_each_process_may_be_left_out():
    def made(when):
        class Net(nn.Linear):
            def __init__(self):
                super().__init__(2, 2)
                self.when = when

            def forward(self, x):
                return super().forward(x) + when * 0

        return Net()

    assert code_of(made(1.0)) != code_of(made(2.0))
    assert code_of(made(1.0), values=False) == code_of(made(2.0), values=False)
    assert code_of(made(1.0), values=False) != code_of(nn.Linear(2, 2), values=False)
