"""Wishes of single ranks: what all of them do after a step."""

import torch

from kway.step.outcome import Outcome
from kway.training.requests import SAVE, STOP, Requests, who_asked
from kway.world import StopRequest

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


def test_who_stopped_a_run():
    none, own, above = StopRequest(), StopRequest("SIGUSR1", direct=True), StopRequest("SIGTERM")
    assert who_asked([none, own, none]) == "SIGUSR1 to rank 1"
    assert who_asked([none, own, own]) == "SIGUSR1 to ranks 1, 2"
    assert who_asked([own, own]) == who_asked([own]) == "SIGUSR1"
    # Word from whoever started the ranks comes to some of them later.
    assert who_asked([none, above, none]) == who_asked([own, above]) == "SIGTERM"
