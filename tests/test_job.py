"""What a job takes, and what it refuses when it is made."""

import pytest
import torch
from torch import nn

import kway

OPTIMIZER = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)


class Weighted(nn.MSELoss):
    def __init__(self, weight):
        super().__init__()
        self.weight = weight


class ByDescriptor:
    def __fspath__(self):
        return b"x"


def job(**given):
    usual = {"model": nn.Linear, "loss": nn.MSELoss(), "optimizer": torch.optim.SGD, "data": None}
    return kway.Job(**(usual | given))


def test_a_class_of_losses_is_taken_as_one_that_is_made():
    made = job(loss=nn.CrossEntropyLoss).loss
    assert isinstance(made, nn.CrossEntropyLoss)
    assert job(loss=made).loss is made


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"loss": Weighted}, r"loss Weighted, .* 'weight': .*; pass one that is made: Weighted\(...\)"),
        ({"loss": "mse"}, r"loss is 'mse': it must be callable; pass nn.CrossEntropyLoss\(\), say"),
        ({"optimizer": OPTIMIZER}, r"optimizer is of type SGD: .*; .* pass partial\(torch.optim.SGD, lr="),
        (
            {"schedule": torch.optim.lr_scheduler.StepLR(OPTIMIZER, 3)},
            r"schedule is of type StepLR: .*; .* pass partial\(torch.optim.lr_scheduler.StepLR, step_size=",
        ),
        (
            {"schedule": torch.optim.lr_scheduler.ReduceLROnPlateau(OPTIMIZER)},
            r"pass partial\(torch.optim.lr_scheduler.ReduceLROnPlateau, \.\.\.\)",
        ),
        ({"metrics": kway.accuracy}, r"metrics is of type function: .*; pass {\"accuracy\": kway.accuracy}"),
        ({"metrics": [kway.accuracy]}, r"metrics is of type list: .*; pass {\"accuracy\": kway.accuracy}"),
        ({"loss": torch.optim.SGD}, r"loss is the class SGD: .*\(nn.Module\).*; pass nn.CrossEntropyLoss"),
        ({"shuffle": "no"}, "shuffle='no': it must be True or False"),
        ({"shuffle": 3}, "shuffle=3: it must be True or False"),
        ({"shuffle": None}, "shuffle=None: it must be True or False"),
        ({"workers": 1025}, "workers=1025: at most 1,024: .* on every rank; as many as"),
        ({"init": 3}, "init=3: it must be a path, or a function"),
        ({"init": b"x"}, "init=b'x': it must be a path, or a function"),
        ({"init": ByDescriptor()}, "init=.*: it must be a path"),
        ({"init": ""}, "init='': an empty text names nothing"),
        ({"init": "a\0b"}, "no path holds a null character"),
        ({"metrics": {"accuracy": 0.5}}, "metric 'accuracy' is of type float: it must be callable"),
    ],
)
def test_what_cannot_work_is_refused_with_what_to_pass(given, said):
    with pytest.raises(kway.UsageError, match=said):
        job(**given)


def test_a_loss_may_be_an_object_that_is_called():
    class Mine:
        def __call__(self, output, target):
            return (output - target) ** 2

    made = Mine()
    assert job(loss=made).loss is made
    with pytest.raises(kway.UsageError, match="loss is the class Mine"):
        job(loss=Mine)


def test_what_is_just_allowed_is_taken():
    assert job(workers=1024, shuffle=False).shuffle is False
