"""What one rank's loss leaves out: the others must not wait for it, nor get other numbers."""

from functools import partial

import pytest
import torch
from torch import nn

import kway
from kway.errors import RankError

SGD = partial(torch.optim.SGD, lr=0.2)
DRAW = torch.Generator().manual_seed(0)
X = torch.randn(14, 6, generator=DRAW, dtype=torch.float64)
# The first sample of each batch of four is the only one that counts: it lies on the first rank.
Y = torch.tensor([0, 1, 1, 1] * 3 + [0, 1])


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3))


def constant(output, target):
    """Per-sample losses, detached from the model where no sample counts."""
    if not (target == 0).any():
        return torch.zeros(len(target), dtype=output.dtype)
    return nn.functional.cross_entropy(output, target, reduction="none") * (target == 0)


def constant_after_gathering(output, target):
    every, place = kway.all_samples(output, place=True)
    if not (target == 0).any():
        return torch.zeros(len(target), dtype=output.dtype)
    own = torch.arange(len(every))[place]
    return nn.functional.cross_entropy(output @ every.T, own, reduction="none") * (target == 0)


class OwnLoss(Net):
    """Returns its own loss: nothing else is there to start from."""

    def forward(self, x, y):
        return constant(super().forward(x), y).sum(), torch.tensor(float(len(x)), dtype=x.dtype)


def job(model=Net, loss=constant, **more):
    given = {"optimizer": SGD, "data": (X, Y), "batch_size": 4, "shuffle": False, "precision": "fp64", **more}
    return kway.Job(model=model, loss=loss, **given)


@pytest.mark.parametrize(
    ("model", "loss"), [(Net, constant), (Net, constant_after_gathering), (OwnLoss, None)]
)
@pytest.mark.parametrize("size", [2, 3])
def test_a_constant_loss_on_one_rank(trained, model, loss, size):
    one, several = (trained(job(model, loss), k).model.state_dict() for k in (1, size))
    for name in one:
        torch.testing.assert_close(several[name], one[name], rtol=1e-12, atol=1e-14)


class Penalised(nn.Module):
    """A gradient penalty: a derivative of a derivative through batch normalisation."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 1))

    def forward(self, x, _):
        x = x.detach().requires_grad_(True)
        output = self.layers(x)
        (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        return slope.square().sum() + output.square().sum(), torch.tensor(float(len(x)), dtype=x.dtype)


def test_a_second_derivative_through_global_statistics_is_refused_by_name(trained):
    assert trained(job(Penalised, None), 1).epochs
    with pytest.raises(kway.RefusedError, match="derivative of a derivative through batch normalisation"):
        trained(job(Penalised, None), 2)
    # Whole batches: a shard of one sample has no variance.
    whole = job(Penalised, None, data=(X[:12], Y[:12]))
    one, two = (trained(whole, k, exactness="bits", shards=2).record.weights_sha256 for k in (1, 2))
    assert one == two


class Spectral(nn.Module):
    """Buffers that follow from the weights, and one that counts."""

    def __init__(self):
        super().__init__()
        self.layer = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 3))
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.passes += 1
        return self.layer(x)


def test_buffers_that_follow_from_the_weights_have_equal_bits(trained):
    given = job(Spectral, nn.CrossEntropyLoss(), data=(X.float(), Y), precision="fp32")
    runs = [trained(given, k, exactness="bits", shards=3) for k in (1, 2, 3)]
    assert len({run.record.weights_sha256 for run in runs}) == 1
    # Four batches, the last of two samples: one of the three shards is empty there.
    assert [int(run.model.passes) for run in runs] == [4, 4, 4]
    plain = Spectral()
    plain.load_state_dict(runs[0].model.state_dict())
    moved = [name for name, value in plain.state_dict().items() if name.endswith("_u")]
    assert moved


class Remembers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x):
        self.mean = x.mean(0).detach()
        return self.layer(x)


@pytest.mark.parametrize("size", [1, 2])
def test_a_buffer_that_depends_on_the_samples_is_refused_at_bits_on_any_number(trained, size):
    given = job(Remembers, nn.CrossEntropyLoss(), data=(X.float(), Y), precision="fp32")
    with pytest.raises((RankError, kway.KwayError), match="buffer 'mean' depends on the samples"):
        trained(given, size, exactness="bits", shards=4)


def some(named):
    return torch.optim.SGD([parameter for _, parameter in named if parameter.requires_grad], lr=0.1)


class Thaws(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 4), nn.Linear(4, 3)
        self.first.requires_grad_(False)
        self.passes = 0

    def forward(self, x):
        self.passes += 1
        if self.passes == 2:
            self.first.requires_grad_(True)
        return self.second(self.first(x))


@pytest.mark.parametrize("size", [1, 2])
def test_a_parameter_unfrozen_without_an_optimizer_is_an_error_at_the_next_step(trained, size):
    given = job(Thaws, nn.CrossEntropyLoss(), data=(X, Y), optimizer=some)
    with pytest.raises((RankError, kway.KwayError), match=r"'first\.weight' was replaced, added or unfrozen"):
        trained(given, size)


def test_clipping_complex_numbers_by_value_is_refused_before_start(trained):
    class Phase(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(6, dtype=torch.complex128))

        def forward(self, x):
            return (x * self.w).abs()[:, :3]

    given = job(Phase, nn.CrossEntropyLoss(), clip=("value", 1.0))
    with pytest.raises(kway.RefusedError, match="complex numbers have no order"):
        trained(given, 2)
