"""Models at the edges of what travels: one device and several must agree, whatever dtypes they hold."""

import os
from functools import partial

import pytest
import torch
from torch import nn

import kway

X = torch.randn(20, 5, generator=torch.Generator().manual_seed(0))
Y = torch.zeros(20, 3)


class Half(nn.Module):
    """Every parameter in one low precision: no vector of gradients is wide enough to carry numbers."""

    def __init__(self, dtype):
        super().__init__()
        self.layer = nn.Linear(5, 3).to(dtype)

    def forward(self, x):
        return self.layer(x.to(self.layer.weight.dtype)).float()


class Holds(nn.Module):
    """A frozen parameter, and a buffer, of a dtype that back ends do not know."""

    def __init__(self, parameter, buffer):
        super().__init__()
        self.layer = nn.Linear(5, 3)
        self.index = nn.Parameter(torch.ones(3, dtype=parameter), requires_grad=False)
        self.register_buffer("table", torch.ones(3, dtype=buffer))

    def forward(self, x):
        return self.layer(x) * self.index.float() * self.table.float()


def trained(ranks, model, size, exactness="math", batch_size=20):
    job = kway.Job(
        model=model, loss=nn.MSELoss(), optimizer=partial(torch.optim.SGD, lr=1.0), data=(X, Y),
        batch_size=batch_size, shuffle=False,
    )  # fmt: skip
    return kway.train(
        job,
        devices=f"cpu:{size}",
        strategy="data",
        epochs=1,
        exactness=exactness,
        shards=5,
        ranks=ranks,
        echo=False,
    )


@pytest.mark.parametrize("batch_size", [20, 18])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_all_in_half_has_the_same_bits_and_the_right_step(ranks, dtype, batch_size):
    runs = [trained(ranks, partial(Half, dtype), size, "bits", batch_size) for size in (1, 2, 3)]
    assert len({run.record.weights_sha256 for run in runs}) == 1
    right = trained(ranks, partial(Half, dtype), 1, "math", batch_size)
    assert runs[0].epochs[-1]["train_loss"] == pytest.approx(right.epochs[-1]["train_loss"], rel=0.02)
    torch.testing.assert_close(runs[0].model.layer.bias, right.model.layer.bias, rtol=0.05, atol=0.01)


@pytest.mark.parametrize("exactness", ["math", "bits"])
@pytest.mark.parametrize(("parameter", "buffer"), [(torch.int64, torch.int16), (torch.bool, torch.uint16)])
def test_whole_numbers_that_are_not_trained_may_have_any_dtype(ranks, parameter, buffer, exactness):
    alone, two = (trained(ranks, partial(Holds, parameter, buffer), size, exactness) for size in (1, 2))
    torch.testing.assert_close(alone.model.layer.bias, two.model.layer.bias, rtol=0, atol=1e-6)
    assert torch.equal(two.model.table, torch.ones(3, dtype=buffer))


def test_ranks_that_train_other_parameters_are_refused(ranks):
    class Uneven(nn.Linear):
        def __init__(self):
            super().__init__(5, 3)
            self.bias.requires_grad_(os.environ.get("RANK") == "0")

    with pytest.raises(kway.KwayError, match="all ranks must train the same"):
        trained(ranks, Uneven, 2)


@pytest.mark.parametrize("size", [1, 2])
def test_a_layer_without_parameters_that_comes_later_is_refused(ranks, size):
    class Grows(nn.Linear):
        def forward(self, x):
            if not hasattr(self, "norm"):
                self.norm = nn.BatchNorm1d(3, affine=False)
            return super().forward(x)

    with pytest.raises(kway.KwayError, match=r"'norm'.*replaced or added after the run began"):
        trained(ranks, partial(Grows, 5, 3), size, batch_size=10)


@pytest.mark.parametrize("size", [1, 2])
def test_a_buffer_that_a_layer_makes_when_it_first_runs_is_no_other_layer(ranks, size):
    class Caches(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.body, self.head = nn.Linear(5, 5), nn.Linear(5, 3)
            self.passes = 0

        def forward(self, x):
            if not hasattr(self, "table"):
                self.register_buffer("table", torch.linspace(0, 1, 5, dtype=x.dtype))
            self.passes += 1
            # Seen at the next step, with the buffer there.
            self.body.requires_grad_(self.passes < 2)
            return self.head(self.body(x) + self.table)

    assert "table" in dict(trained(ranks, Caches, size, batch_size=10).model.named_buffers())
