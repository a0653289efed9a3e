"""A step over a share, as the whole of a batch and in micro-batches."""

from functools import partial

import pytest
import torch
from torch import nn

import kway

X = torch.randn(5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.linspace(-1, 1, 5, dtype=torch.float64)


class Mixed(nn.Module):
    """A complex parameter before a real one, or behind it."""

    def __init__(self, complex_first):
        super().__init__()
        w, b = torch.tensor([1 + 1j, 2j, -1], dtype=torch.complex128), torch.tensor(0.5, dtype=torch.float64)
        self.one, self.two = (nn.Parameter(value) for value in ((w, b) if complex_first else (b, w)))

    def forward(self, x):
        w, b = (self.one, self.two) if self.one.is_complex() else (self.two, self.one)
        return (x.to(w.dtype) @ w).abs() * b


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("micro_batch", [None, 2])
@pytest.mark.parametrize("complex_first", [True, False])
def test_complex_and_real_parameters_together(ranks, complex_first, micro_batch, size):
    job = kway.Job(
        model=partial(Mixed, complex_first), loss=nn.MSELoss(), optimizer=partial(torch.optim.SGD, lr=0.1),
        data=(X, Y), batch_size=5, precision="fp64", micro_batch=micro_batch, shuffle=False,
    )  # fmt: skip
    right = Mixed(complex_first)
    nn.functional.mse_loss(right(X), Y).backward()
    own = kway.train(job, devices=f"cpu:{size}", strategy="data", epochs=1, ranks=ranks, echo=False).model
    for value, expected in zip(own.parameters(), right.parameters(), strict=True):
        assert expected.grad is not None
        torch.testing.assert_close(value, (expected - 0.1 * expected.grad), rtol=0, atol=1e-12)
