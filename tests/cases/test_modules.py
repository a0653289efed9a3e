"""What a module does beside its arithmetic: attributes, hooks and state that change in forward."""

from functools import partial

import pytest
import torch
from torch import nn

import kway

SGD = partial(torch.optim.SGD, lr=0.1)
STEPS, BATCH = 5, 6


class Counted(nn.Module):
    """Counts its forward passes twice, in an attribute and in a buffer, and its hooks' calls."""

    def __init__(self):
        super().__init__()
        self.layer = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3, dtype=torch.float64))
        self.counter, self.calls, self.passing = 0, [], []
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))
        self.layer.register_forward_hook(lambda *_: self.calls.append(1))

    def forward(self, x):
        self.counter += 1
        self.passes += 1
        handle = self.layer.register_forward_hook(lambda *_: self.passing.append(1))
        try:
            return self.layer(x)
        finally:
            handle.remove()


def job(**more):
    draw = torch.Generator().manual_seed(4)
    x = torch.randn(STEPS * BATCH, 4, generator=draw, dtype=torch.float64)
    y = torch.randn(STEPS * BATCH, 3, generator=draw, dtype=torch.float64)
    return kway.Job(
        model=Counted,
        loss=nn.MSELoss(),
        optimizer=SGD,
        data=(x, y),
        batch_size=BATCH,
        precision="fp64",
        **more,
    )


def counted(session):
    for batch in session.batches(0):
        session.step(batch)
    model = session.model
    return (
        model.counter,
        int(model.passes),
        len(model.calls),
        len(model.passing),
        len(model.layer._forward_hooks),
    )


@pytest.mark.parametrize("size", [1, 2, 3])
def test_x06_attributes_and_hooks_live_on_every_rank(looped, size):
    # Five steps on each rank: a hook runs once for each forward pass, and none is left behind.
    assert looped(job(), counted, size) == [(STEPS, STEPS, STEPS, STEPS, 1)] * size


def test_x06_spectral_norm_has_the_vectors_of_one_device(trained):
    one, two = (trained(job(), size).model.state_dict() for size in (1, 2))
    assert list(one) == list(two)
    names = [name for name in one if name.endswith(("_u", "_v"))]
    assert len(names) == 2
    for name in one:
        torch.testing.assert_close(two[name], one[name], rtol=1e-12, atol=1e-14)


def test_x06_buffers_come_back_and_plain_attributes_stay_with_the_ranks(trained):
    model = trained(job(), 2).model
    assert int(model.passes) == STEPS
    assert model.counter == 0


class Weight(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.tensor(1.0, dtype=torch.float64))

    def forward(self, x):
        return self.w * x


def summed(output, _):
    return output.sum(), torch.ones((), dtype=torch.float64)


def test_x03_accumulation_reduces_every_step(trained):
    """x = rank + 1 on two ranks in two micro-batches each: the summed gradient is 2 (1 + 2) at each of 3 steps."""
    x = torch.tensor([1.0, 1.0, 2.0, 2.0] * 3, dtype=torch.float64)
    given = kway.Job(
        model=Weight,
        loss=summed,
        optimizer=partial(torch.optim.SGD, lr=1.0),
        data=(x, torch.zeros_like(x)),
        batch_size=4,
        micro_batch=1,
        shuffle=False,
        precision="fp64",
    )
    weights = [trained(given, 2, steps=steps).model.w.item() for steps in (1, 2, 3)]
    assert [1 - weights[0], weights[0] - weights[1], weights[1] - weights[2]] == pytest.approx([6 / 4] * 3)
