"""Gradients of dtypes that are not those of their parameters, and whether they can be summed."""

from functools import partial

import pytest
import torch
from torch import nn

import kway

X = torch.ones(4, 2)


class Wide(torch.autograd.Function):
    """A product whose gradient is single whatever the weight is."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x)
        return x @ w.to(x.dtype)

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        return None, x.T @ dy


class Half(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(2, 2, dtype=torch.bfloat16))
        self.w.grad_dtype = dtype

    def forward(self, x):
        return Wide.apply(x, self.w)


def job_of(dtype):
    return kway.Job(
        model=partial(Half, dtype), loss=nn.MSELoss(), optimizer=torch.optim.SGD, data=(X, X), batch_size=4
    )


@pytest.mark.skipif(not hasattr(nn.Parameter, "grad_dtype"), reason="this torch has no grad_dtype")
@pytest.mark.parametrize("dtype", [None, torch.complex64])
@pytest.mark.parametrize(("size", "exactness"), [(2, "math"), (2, "loose"), (1, "bits")])
def test_a_gradient_that_may_have_any_dtype_is_refused_where_it_is_summed(dtype, size, exactness, leftovers):
    with pytest.raises(
        kway.RefusedError, match=r"parameter 'w' \(torch.bfloat16\) with grad_dtype .*set grad_dtype"
    ):
        kway.train(job_of(dtype), devices=f"cpu:{size}", exactness=exactness, epochs=1, echo=False)
    assert not leftovers()


@pytest.mark.skipif(not hasattr(nn.Parameter, "grad_dtype"), reason="this torch has no grad_dtype")
def test_one_device_takes_it_and_several_take_one_that_is_known(ranks):
    kway.train(job_of(None), devices="cpu:1", epochs=1, echo=False)
    kway.train(job_of(torch.float32), devices="cpu:2", epochs=1, ranks=ranks, echo=False)
