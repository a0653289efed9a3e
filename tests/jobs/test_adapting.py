"""What is said of a run that nobody can adapt to its memory."""

from functools import partial

import pytest
import torch
from torch import nn

import kway
from kway.data.order import KeyedOrder
from kway.jobs.adapting import adapting_of
from kway.jobs.place import place


@pytest.mark.parametrize(
    ("level", "said"),
    [
        (
            "math",
            "choose a smaller batch before the start (batch_size or --batch-size), which is another run, ",
        ),
        ("loose", "choose before the start what fits (micro_batch or --micro-batch), "),
        ("bits", "choose more shards before the start (shards or --shards), "),
    ],
)
def test_what_cannot_be_adapted_is_told_what_can_be_chosen_at_its_level(level, said):
    job = kway.Job(
        partial(nn.Linear, 3, 3), nn.MSELoss(), partial(torch.optim.SGD, lr=0.1), None, batch_size=16
    )
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    with pytest.raises(kway.RefusedError) as caught:
        adapting_of("adapt", job, model, place("cpu:1", exactness=level), KeyedOrder(64, 16, seed=0))
    assert f"{said}more devices, or leave on_oom out" in str(caught.value)
