"""A penalty follows from the weights alone; one that reads what forward kept is told so."""

from functools import partial

import pytest
import torch
from torch import nn

import kway

X, Y = torch.randn(6, 3, generator=torch.Generator().manual_seed(0)), torch.zeros(6, 1)


class Keeps(nn.Linear):
    """Keeps what it gave."""

    def forward(self, x):
        self.kept = super().forward(x)
        return self.kept


def train(penalty, **more):
    job = kway.Job(
        partial(Keeps, 3, 1), nn.MSELoss(), torch.optim.SGD, (X, Y), batch_size=6, penalty=penalty,
        micro_batch=more.pop("micro_batch", None),
    )  # fmt: skip
    return kway.train(job, devices="cpu:1", epochs=1, echo=False, **more)


@pytest.mark.parametrize("more", [{}, {"micro_batch": 3}, {"exactness": "bits", "shards": 2}])
def test_one_of_what_forward_kept_is_told_to_be_part_of_the_loss(more):
    with pytest.raises(kway.UsageError, match=r"from the weights alone.*return that.*the loss add it"):
        train(lambda model: model.kept.square().mean(), **more)


def test_other_errors_of_its_gradient_stay_what_they_are():
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.sum()

        @staticmethod
        def backward(ctx, gradient):
            raise RuntimeError("of the user's own")

    with pytest.raises(RuntimeError, match="of the user's own"):
        train(lambda model: Fails.apply(model.weight))
