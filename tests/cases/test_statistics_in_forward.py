"""Models whose forward pass looks at running statistics, or changes what they do: as on one device, at once."""

from functools import partial

import pytest
import torch
from torch import nn

import kway

X = torch.randn(26, 5, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
Y = torch.randint(4, (26,), generator=torch.Generator().manual_seed(4))


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.bn, self.last = nn.Linear(5, 6), nn.BatchNorm1d(6, momentum=0.3), nn.Linear(6, 4)
        self.register_buffer("seen", torch.zeros(6, dtype=torch.float64))


class Reads(Base):
    def forward(self, x):
        h = self.bn(self.first(x))
        return self.last(h + self.bn.running_mean)


class EvaluatesToo(Base):
    def forward(self, x):
        h = self.bn(self.first(x))
        if self.training:
            self.bn.eval()
            h = h + self.bn(self.first(x * 0.5))
            self.bn.train()
        return self.last(h)


class EvaluatesFirst(Base):
    """Training moves what the pass in evaluation mode has to remember for its gradient."""

    def forward(self, x):
        h = self.first(x)
        if not self.training:
            return self.last(self.bn(h))
        self.bn.eval()
        still = self.bn(h)
        self.bn.train()
        return self.last(still + self.bn(h))


class WeighsByVariance(Base):
    def forward(self, x):
        h = self.bn(self.first(x))
        return self.last(h * self.bn.running_var + self.bn(h))


class KeptButNotTracked(Base):
    """Statistics of another width, which torch does not look at."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(5, 4), nn.Linear(4, 4)
        self.bn.weight = self.bn.bias = None
        self.bn.track_running_stats = False

    def forward(self, x):
        return self.last(self.bn(self.first(x)) if self.training else self.first(x))


class NoTensors(Base):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(5, 4), nn.Linear(4, 4)
        self.bn = nn.BatchNorm1d(6, affine=False, track_running_stats=False)

    def forward(self, x):
        return self.last(self.bn(self.first(x)))


class KeepsOut(Base):
    """A pass that must not count, as adversarial and sharpness-aware training have."""

    def forward(self, x):
        momentum, self.bn.momentum = self.bn.momentum, 0.0
        noisy = self.bn(self.first(x + 0.1))
        self.bn.momentum = momentum
        return self.last(noisy + self.bn(self.first(x)))


class OtherBuffers(Base):
    def forward(self, x):
        h = self.first(x)
        if not self.training:
            return self.last(self.bn(h))
        own = {name: value.clone() for name, value in self.bn.named_buffers()}
        kept = torch.func.functional_call(self.bn, own, (h * 2,))
        self.seen = own["running_mean"].detach()
        return self.last(kept + self.bn(h))


class Shared(Base):
    """Two layers that move the same statistics, one after the other."""

    def __init__(self):
        super().__init__()
        self.more = nn.BatchNorm1d(6, momentum=0.1)
        self.more.running_mean, self.more.running_var = self.bn.running_mean, self.bn.running_var

    def forward(self, x):
        return self.last(self.more(self.bn(self.first(x)) * 2))


class Twice(Base):
    def forward(self, x):
        return self.last(self.bn(self.bn(self.first(x)).tanh()))


class PutsBack(Base):
    def forward(self, x):
        kept = self.bn.running_var.clone()
        h = self.bn(self.first(x))
        self.bn.running_var.data.copy_(kept)
        return self.last(h)


class Pruned(Base):
    """Channels cut by hand: torch does not look at num_features."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 4)
        for name in ("weight", "bias"):
            setattr(self.bn, name, nn.Parameter(getattr(self.bn, name)[:4].detach().clone()))
        self.bn.running_mean, self.bn.running_var = torch.zeros(4), torch.ones(4)
        self.last = nn.Linear(4, 4)

    def forward(self, x):
        return self.last(self.bn(self.first(x)))


def job(model):
    return kway.Job(
        model=model,
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        data=(X, Y),
        batch_size=13,
        precision="fp64",
        shuffle=False,
    )


def by_hand(model):
    optimizer = torch.optim.SGD(model.double().train().parameters(), lr=0.1, momentum=0.9)
    for start in (0, 13):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(X[start : start + 13]), Y[start : start + 13]).backward()
        optimizer.step()
    return model.state_dict()


MODELS = [
    Reads, EvaluatesToo, EvaluatesFirst, WeighsByVariance, KeepsOut, OtherBuffers, Shared, Twice, PutsBack, Pruned,
    KeptButNotTracked, NoTensors,
]  # fmt: skip


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("model", MODELS)
def test_it_is_the_loop_by_hand_on_any_number_of_ranks(trained, model, size):
    expected = by_hand(model())
    found = trained(job(model), size).model.state_dict()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, rtol=0, atol=1e-12, msg=lambda text, n=name: f"{n}: {text}"
        )


class Wrong(Base):
    def __init__(self):
        super().__init__()
        self.bn = nn.BatchNorm1d(1, affine=False)

    def forward(self, x):
        return self.last(self.bn(self.first(x)))


@pytest.mark.parametrize("size", [1, 2])
def test_a_layer_of_another_width_is_an_error_on_several_devices_too(trained, size):
    with pytest.raises(Exception, match=r"6 elements|got 6"):
        trained(job(Wrong), size)


class NeverAny(Base):
    """No sample comes to the layer."""

    def forward(self, x):
        some = x[:, 0] > 99
        return self.last(torch.cat([self.bn(self.first(x[some])), self.first(x[~some])]))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_batch_of_no_samples_is_counted_and_moves_nothing(trained, size):
    expected = by_hand(NeverAny())
    found = trained(job(NeverAny), size).model.state_dict()
    assert found["bn.num_batches_tracked"] == 2
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-12)


@pytest.mark.parametrize("model", [Pruned, NoTensors, NeverAny])
def test_statistics_at_bits_move_with_as_many_channels_as_there_are(trained, model):
    runs = [trained(job(model), size, exactness="bits", shards=3) for size in (1, 2)]
    assert runs[0].record.weights_sha256 == runs[1].record.weights_sha256
    moved = getattr(runs[0].model.bn, "running_mean", None)
    assert (moved is not None and bool((moved != 0).any())) == (model is Pruned)
