"""Wishes of single ranks: what all of them do after a step."""

import torch

from kway.step.core import Outcome
from kway.training.requests import SAVE, STOP, Requests

ZERO = torch.zeros(())


def after(requests, *asked):
    return requests.after(Outcome(ZERO, ZERO, ZERO, torch.tensor(asked, dtype=torch.float64)), 0)


def test_a_wish_of_any_rank_is_heard_with_its_step_on_a_cpu():
    requests = Requests(torch.device("cpu"))
    assert [after(requests, 0, 0), after(requests, 0, SAVE), after(requests, STOP, SAVE)] == [
        0,
        SAVE,
        SAVE | STOP,
    ]


def test_one_device_hears_itself_at_once():
    requests = Requests(torch.device("cpu"))
    assert requests.after(Outcome(ZERO, ZERO, ZERO), STOP) == STOP
