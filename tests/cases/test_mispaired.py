"""Ranks that call other collectives than each other: an error, never numbers."""

import os
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

import kway
from kway.comm.flat import FlatGradients
from kway.comm.trace import Trace


class Extra(nn.Module):
    """In its third training step sums something of its own, on one rank only."""

    def __init__(self, numel):
        super().__init__()
        self.layer, self.norm, self.numel, self.step = nn.Linear(6, 4), nn.BatchNorm1d(4), numel, 0

    def forward(self, x):
        if self.training:
            self.step += 1
            if self.step == 3 and os.environ.get("RANK") == "1":
                dist.all_reduce(torch.ones(self.numel))
        return self.norm(self.layer(x))


def job(numel):
    draw = torch.Generator().manual_seed(1)
    return kway.Job(
        model=partial(Extra, numel),
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        data=(torch.rand(80, 6, generator=draw), torch.randint(4, (80,), generator=draw)),
        batch_size=10,
    )


@pytest.mark.timeout(60)
def test_a_sum_that_one_rank_calls_by_itself_is_found_before_the_optimizer_acts(trained):
    # At level loose the next collective of the other rank is the sum of the gradients. Of equal length, the back end
    # pairs the two without a word.
    as_long = len(FlatGradients(list(Extra(1).parameters()), 4 * 2).vectors[0])
    with pytest.raises(kway.MispairedError, match=r"do not fit together|other collectives"):
        trained(job(as_long), 2, exactness="loose")


def test_the_fingerprint_knows_order_shape_and_dtype():
    def of(*calls):
        trace = Trace()
        for call in calls:
            trace.note(*call)
        return trace.take()

    a, b = ("sum", (3,), torch.float32), ("stack", (3,), torch.float32)
    assert of(a, b) == of(a, b)
    others = [
        of(b, a),
        of(a),
        of(a, b, b),
        of(a, ("stack", (4,), torch.float32)),
        of(a, ("stack", (3,), torch.float64)),
    ]
    assert len({of(a, b), *others}) == 6
    assert all(0 < value < 2**16 for value in (of(), of(a), *others))


def test_taking_the_fingerprint_starts_anew():
    trace = Trace()
    empty = trace.take()
    trace.note("sum")
    assert trace.take() != empty
    assert trace.take() == empty
