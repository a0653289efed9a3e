import math
from dataclasses import replace

import pytest
import torch

from kway.errors import MispairedError, NonFiniteError
from kway.step.mispaired import check_calls
from kway.step.outcome import Outcome
from kway.training.requests import LAG
from kway.training.watch import LossWatch

CPU = torch.device("cpu")
NAN, INF = math.nan, math.inf


def outcome(loss, weight=1.0, losses=(1.0, 1.0)):
    return Outcome(torch.tensor(loss), torch.tensor(weight), torch.tensor(losses))


def test_an_epoch_s_mean_is_weighted_as_the_losses_were():
    watch = LossWatch(CPU)
    watch.add(1, 1, outcome(2.0, 4.0))
    watch.add(1, 2, outcome(5.0, 1.0))
    assert watch.last == 5.0
    assert watch.epoch_mean() == pytest.approx(13 / 5)
    watch.add(2, 1, outcome(7.0, 3.0))
    assert watch.epoch_mean() == 7.0
    assert math.isnan(watch.epoch_mean())


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (outcome(NAN, losses=(1.0, NAN)), "the loss is nan at epoch 3, step 7: rank 1 computed it"),
        (outcome(INF, losses=(INF, NAN)), "the loss is inf at epoch 3, step 7: rank 0 computed it"),
        (outcome(NAN, 0.0, (0.0, 0.0)), "no sample of the batch has a weight"),
        (outcome(INF), "each rank's own sum is finite"),
    ],
)
def test_a_loss_that_is_no_number_is_named(found, said):
    with pytest.raises(NonFiniteError, match=said):
        LossWatch(CPU).add(3, 7, found)


@pytest.mark.parametrize("calls", [torch.tensor([5.0, 7.0]), None], ids=["told", "not told"])
def test_a_loss_is_not_blamed_where_ranks_called_other_collectives(calls):
    def compare(again):
        # A later step may have told, which is read after this one.
        assert again
        check_calls(torch.tensor([5, 7]))

    found = replace(outcome(NAN, losses=(NAN, 0.0)), asked=torch.zeros(2), calls=calls)
    with pytest.raises(MispairedError):
        LossWatch(CPU, compare=compare).add(3, 7, found)


def test_where_reading_waits_for_the_device_it_is_done_seldom():
    watch = LossWatch(torch.device("cuda"), every=3)
    watch.add(1, 1, outcome(1.0))
    watch.add(1, 2, outcome(NAN, losses=(NAN, 0.0)))
    watch.add(1, 3, outcome(1.0))
    for step in range(LAG - 1):
        watch.add(1, 4 + step, outcome(1.0))
    with pytest.raises(NonFiniteError, match="epoch 1, step 2: rank 0"):
        watch.add(1, 3 + LAG, outcome(1.0))


def test_a_loss_is_told_when_it_is_here_and_in_order():
    watch, told = LossWatch(torch.device("cuda")), []
    watch.add(1, 1, outcome(1.0))
    watch.tell(told.append)
    for step in range(2, 2 + LAG):
        assert told == []
        watch.add(1, step, outcome(float(step)))
    assert told == [1.0]
    watch.tell(told.append)
    watch.check()
    assert told == [1.0, float(1 + LAG)]


def test_a_loss_is_told_at_once_on_a_cpu():
    watch, told = LossWatch(CPU), []
    watch.add(1, 1, outcome(3.0))
    watch.tell(told.append)
    assert told == [3.0]
