"""What a loop of one's own may change in a share before it steps on it, and what it may not."""

from functools import partial

import pytest
import torch
from torch import nn

import kway

X, Y = torch.randn(6, 3, generator=torch.Generator().manual_seed(0)), torch.zeros(6, 1)


def stepped(act, level="math", **more):
    job = kway.Job(
        model=partial(nn.Linear, 3, 1),
        loss=nn.MSELoss(),
        optimizer=torch.optim.SGD,
        data=(X, Y),
        batch_size=6,
        **more,
    )
    with kway.parallel(job, devices="cpu:1", exactness=level) as p:
        for batch in p.batches(0):
            act(batch)
            loss = float(p.step(batch))
    return loss


def drops_all(share):
    share.micro.clear()


def drops_one(share):
    share.micro.pop()


def adds_one(share):
    share.micro.append(share.micro[0])


@pytest.mark.parametrize("act", [drops_all, drops_one, adds_one])
@pytest.mark.parametrize(
    "more", [{"micro_batch": 2}, {"level": "bits"}, {}], ids=["micro", "shards", "whole"]
)
def test_a_share_without_all_of_its_samples_is_one_error(act, more):
    with pytest.raises(kway.UsageError, match=r"not those 6 samples.*change the tensors of a micro-batch"):
        stepped(act, **more)


@pytest.mark.parametrize("more", [{"micro_batch": 2}, {"level": "bits"}])
def test_its_tensors_may_be_others(more):
    def zeros(share):
        for place, ((inputs, targets), count) in enumerate(share.micro):
            share.micro[place] = ((inputs * 0, targets * 0 + 2), count)

    def whole(share):
        share.micro[0] = ((X * 0, Y + 2), 6)

    assert stepped(zeros, **more) == pytest.approx(stepped(whole))
