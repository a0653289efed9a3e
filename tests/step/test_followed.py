"""A loss module that is changed between steps is followed, or what cannot be followed is an error."""

import pytest
import torch
from torch import nn

from kway.errors import UsageError
from kway.step.losses import rule_for

CPU = torch.device("cpu")
OUTPUT, TARGET = torch.tensor([[3.0], [1.0]]), torch.tensor([[0.0], [0.0]])


class Held(nn.Module):
    """A loss with a value of every kind that is followed."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList([nn.L1Loss(reduction="none")])
        self.factor, self.factors, self.nested = 1.0, [torch.tensor(1.0)], {"a": [1.0, {"b": torch.ones(1)}]}
        self.register_buffer("scale", torch.ones(()))
        self.later = []

    def forward(self, output, target):
        inner = self.nested["a"]
        factor = self.factor * self.factors[0] * inner[0] * inner[1]["b"] * self.scale * (1 + sum(self.later))
        return factor * sum(part(output, target) for part in self.parts)


def other_factor(loss):
    loss.factor = 5.0


def other_in_list(loss):
    loss.factors[0] = torch.tensor(5.0)


def in_place_in_list(loss):
    loss.factors[0].mul_(5)


def other_in_nested(loss):
    loss.nested["a"][1]["b"] = torch.full((1,), 5.0)


def in_place_in_nested(loss):
    loss.nested["a"][1]["b"].mul_(5)


def number_in_nested(loss):
    loss.nested["a"][0] = 5.0


def buffer(loss):
    loss.scale.mul_(5)


def filled(loss):
    loss.later.append(4.0)


CHANGES = [
    other_factor, other_in_list, in_place_in_list, other_in_nested, in_place_in_nested, number_in_nested, buffer,
    filled,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_counts_from_the_next_look_on(change):
    loss = Held()
    rule = rule_for(loss, CPU)
    assert not rule.changed()
    assert float(rule(OUTPUT, TARGET, 2)[0]) == 4
    change(loss)
    assert rule.changed()
    assert float(rule(OUTPUT, TARGET, 2)[0]) == float(loss(OUTPUT, TARGET).sum()) == 20
    assert not rule.changed()


def test_what_says_the_same_as_before_is_no_change():
    loss = Held()
    rule = rule_for(loss, CPU)
    loss.factor, loss.nested = float("1"), {"a": [1.0, loss.nested["a"][1]]}
    assert not rule.changed()


def replaced(loss):
    loss.parts[0] = nn.MSELoss(reduction="none")


def appended(loss):
    loss.parts.append(nn.MSELoss(reduction="none"))


def gone(loss):
    del loss.parts[0]


@pytest.mark.parametrize("change", [replaced, appended, gone], ids=lambda change: change.__name__)
def test_other_modules_inside_are_an_error(change):
    loss = Held()
    rule = rule_for(loss, CPU)
    change(loss)
    with pytest.raises(
        UsageError, match=r"module 'parts.[01]' of the loss Held was added, removed or replaced"
    ):
        rule.changed()


@pytest.mark.parametrize("kind", [nn.MSELoss, nn.TripletMarginLoss, nn.CosineEmbeddingLoss])
def test_another_reduction_of_one_of_torch_s_is_an_error(kind):
    loss = kind()
    rule = rule_for(loss, CPU)
    loss.reduction = "sum"
    with pytest.raises(UsageError, match=f"reduction of the loss {kind.__name__} was changed"):
        rule.changed()


def test_a_reduction_of_the_users_own_is_followed():
    loss = Held()
    loss.reduction = "mean"
    rule = rule_for(loss, CPU)
    loss.reduction = "sum"
    assert rule.changed()


def test_tensors_of_every_mode_are_followed():
    loss = Held()
    with torch.inference_mode():
        loss.factor = torch.ones(())
    rule = rule_for(loss, CPU)
    assert not rule.changed()
    loss.factor = torch.ones((), requires_grad=True) * 5
    assert rule.changed()
    assert float(rule(OUTPUT, TARGET, 2)[0]) == 20


class Holding(nn.Module):
    """A loss that looks at a model, which torch does not see in a list."""

    def __init__(self, model):
        super().__init__()
        self.models = [model]

    def forward(self, output, target):
        return (output - target).square() + self.models[0].weight.square().sum()


def test_a_loss_that_holds_what_is_trained_is_refused_and_what_is_frozen_is_not():
    model = nn.Linear(1, 1)
    with pytest.raises(UsageError, match=r"Holding.* holds a model, or parameters, in an attribute"):
        rule_for(Holding(model), CPU)
    rule_for(Holding(model.requires_grad_(False)), CPU)


def test_a_model_that_comes_into_a_list_later_is_refused_too():
    loss = Holding(nn.Linear(1, 1).requires_grad_(False))
    rule = rule_for(loss, CPU)
    loss.models.append(nn.Linear(1, 1))
    with pytest.raises(UsageError, match=r"Holding.* holds a model, or parameters, in an attribute"):
        rule.changed()


def test_a_list_may_hold_what_was_computed_from_parameters():
    loss = Held()
    rule = rule_for(loss, CPU)
    loss.factors = [nn.Linear(1, 1).weight.abs().sum() * 0 + 5]
    assert rule.changed()
    assert float(rule(OUTPUT, TARGET, 2)[0]) == 20
