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
        ({"loss": "mse"}, "loss is a str: it must be callable"),
        ({"optimizer": OPTIMIZER}, r"optimizer is a SGD: .*; .* pass partial\(torch.optim.SGD, lr="),
        (
            {"schedule": torch.optim.lr_scheduler.StepLR(OPTIMIZER, 3)},
            r"schedule is a StepLR: .*; .* pass partial\(torch.optim.lr_scheduler.StepLR, step_size=",
        ),
        (
            {"schedule": torch.optim.lr_scheduler.ReduceLROnPlateau(OPTIMIZER)},
            r"pass partial\(torch.optim.lr_scheduler.ReduceLROnPlateau, \.\.\.\)",
        ),
        ({"metrics": kway.accuracy}, r"metrics is a function: .*; pass {\"accuracy\": kway.accuracy}"),
        ({"metrics": [kway.accuracy]}, r"metrics is a list: .*; pass {\"accuracy\": kway.accuracy}"),
        ({"metrics": {"accuracy": 0.5}}, "metric 'accuracy' is a float: it must be callable"),
    ],
)
def test_what_cannot_work_is_refused_with_what_to_pass(given, said):
    with pytest.raises(kway.UsageError, match=said):
        job(**given)
