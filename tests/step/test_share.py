"""A step over a share, as the whole of a batch and in micro-batches."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

import kway
from kway.step.core import StepCore

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


def layers():
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1), nn.Flatten(0))


def of_the_head(named):
    """An optimizer that holds a part of what gets gradients."""
    return torch.optim.SGD([parameter for name, parameter in named if name.startswith("2")], lr=0.1)


HEAD = kway.Job(
    model=layers, loss=nn.MSELoss(), optimizer=of_the_head, data=(X, Y), batch_size=2, precision="fp64",
    shuffle=False, clip=0.3,
)  # fmt: skip


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("exactness", ["math", "bits"])
def test_gradients_beside_the_optimizers_do_not_pile_up_in_what_is_clipped(ranks, exactness, size):
    torch.manual_seed(0)
    right = layers().double()
    optimizer = of_the_head(right.named_parameters())
    for rows in torch.arange(5).split(2):
        right.zero_grad()
        nn.functional.mse_loss(right(X[rows]), Y[rows]).backward()
        nn.utils.clip_grad_norm_(right.parameters(), 0.3)
        optimizer.step()
    own = kway.train(
        HEAD, devices=f"cpu:{size}", strategy="data", epochs=1, exactness=exactness, ranks=ranks, echo=False
    ).model
    for value, expected in zip(own.parameters(), right.parameters(), strict=True):
        torch.testing.assert_close(value, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("exactness", ["math", "bits"])
def test_a_proof_finds_gradients_that_pile_up(monkeypatch, exactness):
    def prove():
        return kway.prove(
            HEAD, devices="cpu:1", exactness=exactness, own_optimizer=True, precision="fp64", echo=False
        )

    assert prove().verdict == "pass"
    monkeypatch.setattr(StepCore, "clear_gradients", lambda step: step.optimizer.zero_grad())
    assert prove().verdict == "fail"


def small(output, target):
    """Losses whose gradients do not overflow in half precision at the scale with which a run begins."""
    return 0.01 * (output - target).square()


def test_gradients_beside_the_optimizers_are_clipped_without_the_scale_of_fp16():
    def moved(precision):
        job = replace(HEAD, precision=precision, data=(X.float(), Y.float()), loss=small, clip=0.003)
        torch.manual_seed(0)
        return kway.train(job, devices="cpu:1", epochs=1, echo=False).model[2].bias - layers()[2].bias

    torch.testing.assert_close(moved("fp16"), moved("fp32"), rtol=0.02, atol=0)


class Counting(nn.Module):
    """Buffers that move with every forward pass, in place and by assignment, and that the output follows."""

    def __init__(self):
        super().__init__()
        self.layer = nn.utils.parametrizations.spectral_norm(nn.Linear(3, 1))
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("factor", torch.tensor(1.0), persistent=False)

    def forward(self, x):
        if self.training:
            self.count += 1
            self.factor = self.factor * 0.9
        return self.layer(x)[:, 0] * self.factor


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("micro_batch", [1, 2, 3])
def test_buffers_move_once_a_step_in_however_many_micro_batches(ranks, micro_batch, size):
    """The last batch is one sample: a rank may have fewer micro-batches than another, or no sample."""
    job = kway.Job(
        model=Counting, loss=nn.MSELoss(), optimizer=partial(torch.optim.SGD, lr=0.1), data=(X, Y),
        batch_size=4, precision="fp64", shuffle=False,
    )  # fmt: skip
    right = kway.train(job, devices="cpu:1", epochs=2, echo=False).model
    assert int(right.count) == 4
    cut = replace(job, micro_batch=micro_batch)
    run = kway.train(cut, devices=f"cpu:{size}", strategy="data", epochs=2, ranks=ranks, echo=False)
    assert not any("buffer" in notice for notice in run.record.notices)
    for name, expected in right.state_dict().items():
        torch.testing.assert_close(run.model.state_dict()[name], expected, rtol=0, atol=1e-12, msg=name)


class Watching(nn.Linear):
    """A buffer that follows the samples."""

    def __init__(self):
        super().__init__(3, 1)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x):
        self.seen = x.detach().mean(0)
        return super().forward(x)[:, 0]


def test_a_buffer_that_follows_a_micro_batch_is_refused_by_name():
    job = kway.Job(
        model=Watching, loss=nn.MSELoss(), optimizer=torch.optim.SGD, data=(X, Y), batch_size=4, micro_batch=2,
        precision="fp64",
    )  # fmt: skip
    with pytest.raises(
        kway.RefusedError, match=r"buffer 'seen' depends on the samples of a micro-batch.*math"
    ):
        kway.train(job, devices="cpu:1", epochs=1, echo=False)
    kway.train(job, devices="cpu:1", epochs=1, exactness="loose", echo=False)
    kway.train(replace(job, micro_batch=4), devices="cpu:1", epochs=1, echo=False)


class Attacked(nn.Linear):
    """Computes an attack on its input with a backward pass of its own, and cleans up after it."""

    to_none = True

    def forward(self, x):
        x = x.detach().requires_grad_(True)
        super().forward(x).square().sum().backward()
        grad = x.grad
        self.zero_grad(set_to_none=self.to_none)
        return super().forward((x + 0.1 * grad.sign()).detach()).squeeze(-1)


class Zeroed(Attacked):
    to_none = False


@pytest.mark.parametrize("model", [Attacked, Zeroed])
@pytest.mark.parametrize("micro_batch", [None, 2])
def test_a_forward_that_clears_gradients_is_refused_where_they_add_up(model, micro_batch):
    job = kway.Job(
        model=partial(model, 3, 1, dtype=torch.float64), loss=nn.MSELoss(),
        optimizer=partial(torch.optim.SGD, lr=0.1), data=(X, Y), batch_size=5, precision="fp64",
        micro_batch=micro_batch,
    )  # fmt: skip
    if micro_batch is None:
        kway.train(job, devices="cpu:1", epochs=1, echo=False)
        return
    with pytest.raises(
        kway.RefusedError, match="a forward pass that clears or changes the model's gradients"
    ):
        kway.train(job, devices="cpu:1", epochs=1, echo=False)
