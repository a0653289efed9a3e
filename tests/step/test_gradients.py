"""Gradients of dtypes that are not those of their parameters, and whether they can be summed."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

import kway
from kway.devices.compilers import missing
from kway.step.gradients import keep_apart

COMPILES = pytest.mark.skipif(missing("cpu") is not None, reason=f"torch.compile: {missing('cpu')}")

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


def test_gradients_that_share_memory_get_their_own():
    shared = torch.arange(12.0)
    parameters = [nn.Parameter(torch.zeros(size)) for size in (12, 2, 3, 5, 1)]
    others = [torch.ones(5), None]
    grads = [shared, shared[1:3], shared[6:9], *others]
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad = grad
    values = [None if grad is None else grad.clone() for grad in grads]
    keep_apart(parameters)
    for parameter in parameters[:-1]:
        parameter.grad.mul_(2)
    for parameter, value in zip(parameters, values, strict=True):
        assert parameter.grad is None if value is None else torch.equal(parameter.grad, 2 * value)
    assert parameters[3].grad is others[0]


class Added(nn.Module):
    """Two tables that are added up as views: torch hands one gradient to both."""

    def __init__(self):
        super().__init__()
        self.one, self.other = (
            nn.Parameter(torch.full((2,), value, dtype=torch.float64)) for value in (1, 2)
        )

    def forward(self, x):
        return (x * (self.one.unsqueeze(0) + self.other.unsqueeze(0))).sum(1)


def square(model):
    return 0.5 * (model.one.square().sum() + model.other.square().sum())


WAYS = [{}, {"micro_batch": 1}, {"clip": 0.5}, {"penalty": square}]


@pytest.mark.parametrize(
    ("step_kind", "devices", "settings"),
    [
        *(("eager", devices, settings) for devices in (1, 2) for settings in WAYS),
        pytest.param("compiled", 1, {"micro_batch": 1, "clip": 0.5}, marks=COMPILES),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else str(value),
)
def test_parameters_that_are_added_up_are_not_changed_twice(step_kind, devices, settings, ranks):
    x = torch.tensor([[1.0, 2.0], [3.0, -1.0], [0.5, 1.0], [2.0, 2.0]], dtype=torch.float64)
    y = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
    sgd = partial(torch.optim.SGD, lr=0.1)
    job = kway.Job(Added, nn.MSELoss(), sgd, data=(x, y), batch_size=4, precision="fp64", **settings)
    run = kway.train(job, devices=f"cpu:{devices}", epochs=1, ranks=ranks, echo=False, step_kind=step_kind)
    values = [torch.full((2,), value, dtype=torch.float64) for value in (1, 2)]
    gradient = 2 * x.T @ (x @ sum(values) - y) / len(x)
    gradients = [gradient + ("penalty" in settings) * value for value in values]
    limit = settings.get("clip", torch.inf)
    factor = min(1.0, limit / (torch.cat(gradients).norm() + 1e-6))
    for name, value, grad in zip(("one", "other"), values, gradients, strict=True):
        torch.testing.assert_close(
            run.model.get_parameter(name), value - 0.1 * factor * grad, rtol=1e-12, atol=0
        )


def test_a_proof_holds_them_against_gradients_that_were_clipped_once(ranks):
    x, y = torch.tensor([[1.0, 2.0], [3.0, -1.0]] * 3), torch.tensor([1.0, 2.0, 3.0] * 2)
    job = kway.Job(Added, nn.MSELoss(), torch.optim.SGD, data=(x, y), batch_size=3, clip=0.5)
    proof = kway.prove(job, devices="cpu:1 cpu:2", ranks=ranks, echo=False)
    assert proof.verdict == "pass", [row["reason"] for row in proof.candidates]


class Kept(torch.autograd.Function):
    """A product that writes the gradient of its weight into memory which it keeps, and returns a view of that."""

    @staticmethod
    def forward(ctx, x, w, kept):
        ctx.save_for_backward(x, w)
        ctx.kept = kept
        return x @ w

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        torch.mm(x.T, dy, out=ctx.kept)
        return dy @ w.T, ctx.kept.view(2, 2), None


class Keeps(nn.Module):
    def __init__(self):
        super().__init__()
        self.w, self.kept = nn.Parameter(torch.eye(2)), torch.zeros(2, 2)

    def forward(self, x):
        return Kept.apply(x, self.w, self.kept)


def test_a_gradient_that_lies_in_memory_of_the_user_s_is_not_written_over_by_the_next_micro_batch():
    x = torch.tensor([[1.0, 2.0], [3.0, -1.0], [0.5, 1.0], [2.0, 2.0]])
    job = kway.Job(Keeps, nn.MSELoss(), partial(torch.optim.SGD, lr=0.1), data=(x, 2 * x), batch_size=4)
    whole, cut = (
        kway.train(replace(job, micro_batch=size), devices="cpu:1", epochs=1, echo=False).model.w
        for size in (None, 1)
    )
    torch.testing.assert_close(cut, whole)


class Nothing(nn.Linear):
    """Has a part of width 0, in a dtype of its own."""

    def __init__(self):
        super().__init__(2, 2)
        self.none = nn.Parameter(torch.zeros(0, 3, dtype=torch.float16))


@pytest.mark.parametrize("exactness", ["math", "bits"])
@pytest.mark.parametrize("size", [1, 2])
def test_a_parameter_without_entries_has_a_dtype_of_its_own(exactness, size, ranks):
    job = kway.Job(Nothing, nn.MSELoss(), torch.optim.SGD, data=(X, X), batch_size=4)
    kway.train(job, devices=f"cpu:{size}", exactness=exactness, epochs=1, ranks=ranks, echo=False)
