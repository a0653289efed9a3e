"""Losses that hold tensors: changed by a loop they are followed, changed by themselves they are refused."""

from functools import partial

import pytest
import torch
from torch import nn

import kway
from kway.step.losses import rule_for

CPU = torch.device("cpu")


class Ramped(nn.Module):
    """A loss that counts how often it is computed."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.tensor(0.0))

    def forward(self, output, target):
        self.calls += 1
        return (output - target) ** 2 * self.calls


@pytest.mark.parametrize(
    ("devices", "options", "refused"),
    [
        ("cpu:1", {}, False),
        ("cpu:1", {"exactness": "bits", "shards": 1}, False),
        ("cpu:2", {}, True),
        ("cpu:1", {"exactness": "bits", "shards": 2}, True),
        ("cpu:1", {"micro_batch": 2}, True),
    ],
)
def test_a_loss_that_changes_its_own_buffer_is_refused_where_a_batch_is_cut(ranks, devices, options, refused):
    more = {"micro_batch": options.pop("micro_batch", None)} if "micro_batch" in options else {}
    job = kway.Job(
        model=lambda: nn.Linear(3, 1), loss=Ramped(), optimizer=partial(torch.optim.SGD, lr=0.1),
        data=(torch.rand(8, 3), torch.rand(8, 1)), batch_size=4, **more,
    )  # fmt: skip

    def train():
        return kway.train(
            job, devices=devices, epochs=1, echo=False, ranks=ranks if devices == "cpu:2" else None, **options
        ).record

    if refused:
        with pytest.raises(kway.KwayError, match=r"the loss changes its buffer 'calls'.*part of the model"):
            train()
    else:
        assert any("changes its buffer 'calls'" in line for line in train().notices)


def test_a_loss_whose_buffer_the_loop_changes_is_followed():
    plain = Scaled()
    rule = rule_for(plain, CPU)
    totals = []
    for scale in (1.0, 3.0):
        plain.scale.fill_(scale)
        rule.changed()
        totals.append(float(rule(torch.ones(2, 1), torch.zeros(2, 1), 2)[0]))
    assert totals == [2.0, 6.0]


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.tensor(1.0))

    def forward(self, output, target):
        return (output - target) * self.scale


class Cached(nn.Module):
    """Keeps what it makes once, and a buffer in the dtype of the output: no state that anything depends on."""

    def __init__(self):
        super().__init__()
        self.register_buffer("weight", torch.ones(1))
        self.register_buffer("mask", None)

    def forward(self, output, target):
        if self.mask is None:
            self.mask = torch.ones(1)
        self.weight = self.weight.to(torch.bfloat16)
        return (output - target) ** 2 * self.weight * self.mask


class Lazy(Cached):
    """Makes its state when it is first computed, and moves it from then on."""

    def forward(self, output, target):
        found = super().forward(output, target)
        self.mask = self.mask + 1
        return found


class Registered(nn.Module):
    """Has no buffer before it is first computed."""

    def forward(self, output, target):
        if not hasattr(self, "centre"):
            self.register_buffer("centre", torch.zeros(1))
        self.centre = 0.9 * self.centre + 0.1 * output.mean(0)
        return (output - self.centre) ** 2


class Undefined(nn.Module):
    """Holds no number, in a shape that changes."""

    def __init__(self):
        super().__init__()
        self.register_buffer("nothing", torch.tensor([float("nan"), 1.0]))

    def forward(self, output, target):
        self.nothing = self.nothing.clone().view(1, -1)
        return (output - target) ** 2


class Turned(nn.Module):
    """Holds the same numbers, and computes something else with them each time."""

    def __init__(self):
        super().__init__()
        self.register_buffer("weight", torch.tensor([[1.0, 2.0]]))

    def forward(self, output, target):
        self.weight = self.weight.T
        return (output - target) ** 2 * self.weight.shape[0]


class LaidOut(nn.Module):
    """Gives its numbers the shape in which they are used."""

    def __init__(self):
        super().__init__()
        self.register_buffer("weight", torch.tensor([1.0, 2.0]))

    def forward(self, output, target):
        self.weight = self.weight.view(-1, 1)
        return (output - target) ** 2 * self.weight


def test_what_is_laid_out_may_be_changed_between_steps():
    plain = LaidOut()
    rule = rule_for(plain, CPU)
    for weight in ([1.0, 2.0], [2.0, 1.0], [5.0, 5.0]):
        plain.weight = torch.tensor(weight)
        rule.changed()
        rule(torch.ones(2, 1), torch.zeros(2, 1), 2)
        rule.check_moved(cut=True)


class Quantised(nn.Module):
    """Holds numbers of a dtype for which little is defined."""

    def __init__(self):
        super().__init__()
        self.register_buffer("weight", torch.quantize_per_tensor(torch.ones(2), 0.5, 0, torch.quint8))

    def forward(self, output, target):
        self.weight = self.weight.clone()
        return (output - target) ** 2


@pytest.mark.parametrize(
    ("loss", "name"),
    [
        (Cached, None), (Lazy, "mask"), (Registered, "centre"), (Undefined, None), (Turned, "weight"), (LaidOut, None),
        (Quantised, None),
    ],
)  # fmt: skip
def test_only_values_that_change_are_state(loss, name):
    rule = rule_for(loss(), CPU)
    found = []
    for _ in range(3):
        rule(torch.ones(2, 1), torch.zeros(2, 1), 2)
        try:
            rule.check_moved(cut=True)
        except kway.RefusedError as error:
            found.append(str(error))
    assert bool(found) == (name is not None)
    makes = {Cached: "mask", Lazy: "mask", Registered: "centre"}.get(loss)
    assert [line for line in rule.doubts if f"makes its buffer {makes!r}" in line] == rule.doubts
    assert bool(rule.doubts) == (makes is not None)
    assert all(f"{name!r}" in text for text in found)
