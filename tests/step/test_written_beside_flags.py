"""A flag in an attribute says that a weight was set: it is not put back for the next piece of a batch."""

from functools import partial

import pytest
import torch
from torch import nn

import kway


class Doubling(nn.Module):
    """Doubles the weights of a layer in it once."""

    def __init__(self):
        super().__init__()
        self.last, self.made = nn.Linear(2, 1), False
        nn.init.ones_(self.last.weight)

    def forward(self, x):
        if not self.made:
            with torch.no_grad():
                self.last.weight.mul_(2.0)
            self.made = True
        return self.last(x)


@pytest.mark.parametrize(
    "options",
    [{"exactness": "bits"}, {"exactness": "bits", "devices": "cpu:2", "strategy": "threads"}, {}],
    ids=str,
)
def test_a_flag_stays_where_a_layer_further_in_was_written(options):
    job = kway.Job(
        model=Doubling,
        loss=nn.MSELoss(),
        optimizer=partial(torch.optim.SGD, lr=0.0),
        data=(torch.ones(16, 2), torch.ones(16, 1)),
        batch_size=16,
        micro_batch=None if options else 4,
    )
    run = kway.train(job, epochs=2, echo=False, **{"devices": "cpu:1", **options})
    assert run.model.last.weight.tolist() == [[2.0, 2.0]]


def test_a_proof_at_bits_lets_it_stay():
    data = torch.rand(16, 2, generator=torch.Generator().manual_seed(0)), torch.ones(16, 1)
    job = kway.Job(
        model=Doubling,
        loss=nn.MSELoss(),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        data=data,
        batch_size=16,
    )
    proof = kway.prove(job, devices="cpu:1", exactness="bits", steps=2, echo=False)
    assert proof.verdict == "pass", [(row["equal"], row["reason"]) for row in proof.candidates]
