"""Recorded steps have the numbers of steps taken as they are, whatever a user changes between two of them."""

import copy
from collections import ChainMap
from dataclasses import replace
from functools import partial

import pytest
import torch
from tests.step.recorded import Net, opened, share
from tests.step.replayed import Recorder
from torch import nn

from kway.step.attributes import Attributes, HostState
from kway.step.graph import GraphedStep
from kway.step.inputs import move
from kway.step.recorder import CudaRecorder
from kway.world import World

STEPS, CHANGED = 12, 6
MOMENTUM = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


class Small(nn.Module):
    """``scale``, ``table``: what a step reads beside its parameters."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.act, self.last = nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)
        self.more = nn.ModuleList([nn.Identity()])
        self.scale, self.table = torch.tensor(1.0), ChainMap({"by": 1.0})

    def forward(self, x):
        x = self.act(self.first(x))
        for module in self.more:
            x = module(x)
        return self.last(x) * self.scale * self.table["by"]


class Other(Small):
    def forward(self, x):
        return 2 * super().forward(x)


def closing():
    """Return a model whose method reads what lies around its class, and what changes that."""
    factors = [1.0]

    class Closing(Small):
        def forward(self, x):
            return super().forward(x) * factors[0]

    return Closing(), partial(factors.__setitem__, 0, 3.0)


def twice(grad):
    return 2 * grad


def double_gradients(optimizer, *_):
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad.mul_(2)


def double(parameter):
    parameter.grad.mul_(2)


def replaced(optimizer):
    for entries in optimizer.state.values():
        entries.update({name: torch.zeros_like(value) for name, value in entries.items()})


CHANGES = {
    "a module": lambda model, _: setattr(model, "act", nn.Tanh()),
    "a module in a list": lambda model, _: model.more.__setitem__(0, nn.Hardtanh(-0.1, 0.1)),
    "one more module": lambda model, _: model.more.append(nn.Tanh()),
    "a class": lambda model, _: setattr(model, "__class__", Other),
    "memory of an attribute": lambda model, _: setattr(model.scale, "data", torch.tensor(3.0)),
    "an attribute in other memory": lambda model, _: model.scale.set_(torch.tensor(3.0)),
    "an entry of a chain": lambda model, _: model.table.__setitem__("by", 3.0),
    "the optimizer's state, forgotten": lambda _, optimizer: optimizer.state.clear(),
    "the optimizer's state, replaced": lambda _, optimizer: replaced(optimizer),
    "a hook of a weight": lambda model, _: model.first.weight.register_hook(twice),
    "a hook after a gradient": lambda model, _: model.first.weight.register_post_accumulate_grad_hook(double),
    "a hook before the optimizer": lambda _, optimizer: optimizer.register_step_pre_hook(double_gradients),
}


def trained(model, change, recorded, device="cpu"):
    """Take steps, with a change between two of them; return losses, what is left, and how often each recording ran."""
    engine, *_ = opened(model, optimizer=MOMENTUM, world=World(device=device))
    recorder = (
        Recorder(engine.model, engine.optimizer) if device == "cpu" else CudaRecorder(engine._step.device)
    )
    step = GraphedStep(engine._step, recorder) if recorded else engine._step
    losses = []
    for number in range(STEPS):
        change(number, engine.model, engine.optimizer)
        own = share(number)
        own = replace(own, micro=move(own.micro, engine._step.device))
        losses.append(step.run(own, number).loss.clone())
    states = [v for entries in engine.optimizer.state.values() for v in entries.values()]
    left = [value.cpu() for value in (*losses, *engine.model.state_dict().values(), *states)]
    if recorded and device != "cpu":
        assert step.ran == "graph", step.notices
    return left, [made.replays for made in getattr(recorder, "made", ())]


def check(make, change, device="cpu"):
    """``change``: called before each step with its number, the model and the optimizer."""
    plain, _ = trained(make(), change, False, device)
    got, replays = trained(make(), change, True, device)
    for one, other in zip(got, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    return replays


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_changes_between_two_steps_is_followed(change):
    replays = check(Small, lambda number, *of: change(*of) if number == CHANGED else None)
    # Three are taken as they are, before each recording.
    assert replays == [CHANGED - 3, STEPS - CHANGED - 3]


def test_without_a_change_there_is_one_recording():
    assert check(Net, lambda *_: None) == [STEPS - 3]


def test_what_a_method_of_a_class_reads_around_it_is_followed():
    changes = []

    def make():
        model, change = closing()
        changes.append(change)
        return model

    def change(number, *_):
        if number == CHANGED:
            changes[-1]()

    assert check(make, change) == [CHANGED - 3, STEPS - CHANGED - 3]


def test_going_back_to_an_earlier_state_is_followed():
    kept = []

    def change(number, model, optimizer):
        if number == CHANGED - 2:
            kept[:] = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
        elif number == CHANGED:
            model.load_state_dict(kept[0])
            optimizer.load_state_dict(kept[1])

    assert check(Net, change) == [CHANGED - 3, STEPS - CHANGED - 3]


def test_a_number_that_a_hook_of_a_weight_closes_over_is_followed():
    factors = [1.0]

    def change(number, model, _):
        if number == 0:
            factors[0] = 1.0
            model.inner[0].weight.register_hook(lambda grad: grad * factors[0])
        elif number == CHANGED:
            factors[0] = 3.0

    assert check(Net, change) == [CHANGED - 3, STEPS - CHANGED - 3]


def test_numbers_that_work_on_another_device_takes_from_the_cpu_are_looked_at():
    model = Small()
    model.by = torch.ones(3)

    def changed(change, kind):
        state = kind(model, elsewhere=True)
        change()
        return state.change()

    for kind in (Attributes, HostState):
        assert changed(lambda: None, kind) is None
        assert "the numbers of 'scale'" in changed(lambda: model.scale.data.add_(1), kind)
        assert "the numbers of 'by'" in changed(lambda: model.by[0].fill_(7.0), kind)
    # On the CPU a recorded step reads them where they lie.
    state = Attributes(model)
    model.scale.add_(1)
    assert state.unchanged()
