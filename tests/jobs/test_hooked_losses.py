"""A loss module that hooks of the model write into computes with what they wrote, wherever it is copied."""

from collections import OrderedDict, defaultdict
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import kway
from kway.step.hooked_losses import knows
from kway.step.losses import rule_for
from kway.step.reach import reached
from kway.strategies.engine import Engine
from kway.world import World

__kway_by_value__ = True
G = torch.Generator().manual_seed(0)
X, Y = torch.randn(32, 8, generator=G, dtype=torch.float64), torch.randint(0, 3, (32,), generator=G)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.b(self.a(x).relu())


class InDict(nn.Module):
    """Wants small activations, which a hook keeps."""

    made, net = dict, Net

    def __init__(self, model):
        super().__init__()
        found = self.found = self.made()
        # It knows the dict alone.
        model.a.register_forward_hook(lambda module, args, out: found.__setitem__("out", out))
        self.register_buffer("weight", torch.ones(3))

    def forward(self, output, target):
        losses = F.cross_entropy(output, target, self.weight.to(output), reduction="none")
        return losses + self.found["out"].abs().mean(1)


class InAttribute(InDict):
    def __init__(self, model):
        nn.Module.__init__(self)
        self.register_buffer("weight", torch.ones(3))
        model.a.register_forward_hook(self.keep)

    def keep(self, module, args, out):
        self.found = {"out": out}


class InOrdered(InDict):
    made = OrderedDict


class InDefault(InDict):
    made = partial(defaultdict, list)


class InInner(InDict):
    """Of a dict in a dict the hook knows the inner one."""

    @property
    def found(self):
        return self.state["inner"]

    @found.setter
    def found(self, found):
        self.state = {"inner": found}


class Box:
    out = None


class InObject(InDict):
    def __init__(self, model):
        nn.Module.__init__(self)
        self.register_buffer("weight", torch.ones(3))
        box = self.box = Box()
        model.a.register_forward_hook(lambda module, args, out: setattr(box, "out", out))

    @property
    def found(self):
        return {"out": self.box.out}


class Keeping(Net):
    def __init__(self):
        super().__init__()
        self.kept = {}

    def forward(self, x):
        self.kept["out"] = self.a(x)
        return self.b(self.kept["out"].relu())


class ByForward(InDict):
    net = Keeping

    def __init__(self, model):
        nn.Module.__init__(self)
        self.register_buffer("weight", torch.ones(3))
        self.found = model.kept


def made(kind):
    torch.manual_seed(5)
    model = kind.net().double()
    return model, kind(model)


KINDS = [InDict, InAttribute, InOrdered, InDefault, InInner, InObject, ByForward]


def job(model, loss):
    sgd = partial(torch.optim.SGD, lr=0.3)
    return kway.Job(model, loss, sgd, (X, Y), batch_size=32, precision="fp64")


@pytest.mark.parametrize("kind", KINDS)
def test_hooks_that_write_into_a_loss_train_as_in_plain_torch(ranks, kind):
    model, loss = made(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for _ in range(2):
        optimizer.zero_grad()
        loss(model(X), Y).mean().backward()
        optimizer.step()
    for devices, strategy in (("cpu:1", "single"), ("cpu:2", "threads"), ("cpu:2", "data")):
        where = {"devices": devices, "strategy": strategy}
        pool = {"ranks": ranks} if strategy == "data" else {}
        run = kway.train(job(*made(kind)), epochs=2, tune=False, echo=False, **where, **pool)
        for own, other in zip(model.parameters(), run.model.parameters(), strict=True):
            torch.testing.assert_close(own, other, rtol=0, atol=1e-14)


@pytest.mark.parametrize("kind", [InDict, InAttribute, InOrdered, InObject])
def test_hooks_that_write_into_a_loss_are_profiled_and_proved(kind):
    model, loss = made(kind)
    own = job(model, loss)
    # What was computed, and lies there since, is no part of a copy.
    model(X)
    before = loss.found["out"]
    assert kway.profile(own, devices="cpu:1", seconds=0.1).timings
    for devices, strategy in (("cpu:1", "single"), ("cpu:2", "threads")):
        assert kway.prove(own, devices=devices, strategy=strategy, steps=2, echo=False).verdict == "pass"
    assert loss.found["out"] is before
    assert loss.weight.dtype == torch.float32
    factory = kway.prove(job(lambda: model, loss), devices="cpu:1", strategy="single", steps=2, echo=False)
    assert factory.verdict == "pass"


def test_a_loss_that_no_hook_knows_is_copied():
    model, loss = made(InDict)
    assert knows(model, loss)
    other = Net()
    assert not knows(other, loss)
    rule = rule_for(loss, torch.device("cpu"), torch.float64, other)
    loss.found["out"] = X.new_zeros(32, 6)
    assert rule.changed()
    assert loss.weight.dtype == torch.float32
    # What kway hangs on a model knows the job.
    normed = nn.Sequential(nn.Linear(8, 3), nn.BatchNorm1d(3)).double()
    engine = Engine(job(normed, loss), normed, {}, World(), "math", 32)
    assert not knows(engine.model, loss)
    engine.close()
    # A frozen part of the model is no loss.
    other.a.register_forward_hook(lambda module, args, out: other.b)
    assert not knows(other, nn.Sequential(other.b))


class Weighing(Net):
    """Reads a list that the loss reads, too."""

    def __init__(self, factors):
        super().__init__()
        self.factors = factors

    def forward(self, x):
        return super().forward(x) * self.factors[0]


class Weighed(nn.Module):
    def __init__(self, factors):
        super().__init__()
        self.factors = factors
        self.register_buffer("weight", torch.ones(3))

    def forward(self, output, target):
        return F.cross_entropy(output, target, self.weight.to(output), reduction="none") * self.factors[1]


def test_a_loss_that_reads_what_the_model_reads_stays_as_it_is():
    factors = [2.0, torch.tensor(3.0)]
    model, loss = Weighing(factors), Weighed(factors)
    # Hooks that know nothing of it, and one of a parameter.
    model.a.register_forward_hook(lambda module, args, out: out * 1)
    model.a.weight.register_hook(lambda gradient: gradient)
    assert not knows(model, loss)
    kway.train(job(model, loss), devices="cpu:1", strategy="single", epochs=1, tune=False, echo=False)
    assert loss.weight.dtype == torch.float32
    model.a.weight.register_hook(factors.append)
    assert knows(model, loss)
    # A function in an attribute is called by forward.
    model = Weighing(factors)
    assert not knows(model, loss)
    model.keep = factors.append
    assert knows(model, loss)


KEPT = InAttribute(Net())


def by_name(module, args, out):
    def keep():
        KEPT.found = {"out": out}

    keep()


def test_a_loss_that_a_function_within_a_hook_finds_by_its_global_name_is_known():
    model = Net()
    # The name of an attribute is none of a variable.
    model.a.register_forward_hook(lambda module, args, out: module.KEPT)
    assert not knows(model, KEPT)
    model.a.register_forward_hook(by_name)
    assert knows(model, KEPT)


class Options(dict):
    """A dict whose entries are its attributes as well, one of them named like a method."""

    def __init__(self, **entries):
        super().__init__(**entries)
        self.__dict__ = self


class Configured(nn.Linear):
    def __init__(self):
        super().__init__(6, 3)
        self.options = Options(values=[1], hidden=6)


class OfOptions(nn.Module):
    def __init__(self):
        super().__init__()
        self.options = Options(values=[1])

    def forward(self, output, target):
        return nn.functional.cross_entropy(output, target, reduction="none")


@pytest.mark.parametrize("strategy", ["single", "threads"])
def test_a_dict_whose_entries_hide_its_methods_is_walked_all_the_same(strategy):
    job = kway.Job(
        Configured(), OfOptions(), torch.optim.SGD, (torch.randn(16, 6), torch.arange(16) % 3), batch_size=8
    )
    devices = "cpu:1" if strategy == "single" else "cpu:2"
    assert (
        kway.train(job, devices=devices, strategy=strategy, epochs=1, echo=False).record.step_kind == "eager"
    )


def test_large_tables_are_not_looked_into_and_losses_of_torch_ask_for_nothing():
    model, loss, plain = Configured(), OfOptions(), nn.CrossEntropyLoss()
    model.vocabulary = {f"w{number}": [number] for number in range(20_000)}
    assert sum(1 for _ in reached([model])) < 1_000
    model.__dict__["known"] = plain
    assert not knows(model, plain)
    model.__dict__["known"] = loss
    assert knows(model, loss)


class Unmasking(nn.Module):
    """A loss that takes a hook off the model in its third step."""

    def __init__(self, handle):
        super().__init__()
        self.handles, self.steps = [handle], 0
        self.own = self.register_forward_hook(lambda module, args, output: output * 2)

    def forward(self, output, target):
        self.steps += 1
        if self.steps == 3:
            self.handles[0].remove()
            self.own.remove()
        return (output[:, 0] - target).square()


@pytest.mark.parametrize("where", [("single", "cpu:1"), ("threads", "cpu:2"), ("data", "cpu:2")], ids=str)
def test_a_loss_that_removes_a_hook_of_the_model_removes_it_where_it_trains(ranks, where):
    def parts():
        layer = nn.Linear(3, 1, dtype=torch.float64)
        nn.init.constant_(layer.weight, 0.5)
        nn.init.zeros_(layer.bias)
        return layer, Unmasking(layer.register_forward_hook(lambda module, args, output: output * 3))

    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = x.sum(1)
    (right, loss), (model, own) = parts(), parts()
    optimizer = torch.optim.SGD(right.parameters(), lr=0.01)
    for _ in range(5):
        optimizer.zero_grad()
        loss(right(x), y).mean().backward()
        optimizer.step()
    options = {"strategy": where[0], "devices": where[1], "epochs": 5, "echo": False}
    job = kway.Job(
        model=model, loss=own, optimizer=partial(torch.optim.SGD, lr=0.01), data=(x, y), batch_size=4
    )
    if where[0] == "data":
        options["ranks"] = ranks
    trained = kway.train(job, **options).model
    torch.testing.assert_close(trained.weight, right.weight, rtol=0, atol=1e-13)
    # The user's own loss keeps its hook.
    assert len(own._forward_hooks) == 1
