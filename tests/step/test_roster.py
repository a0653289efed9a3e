"""A cheap look at whether a model still consists of the same parts, and models that hold them in their own way."""

from functools import partial

import pytest
import torch
from torch import nn

import kway
from kway.step.roster import Roster

X = torch.randn(12, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
Y = torch.randint(2, (12,), generator=torch.Generator().manual_seed(4))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(3, 4), nn.Tanh())
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.body(x))


class Own(Net):
    """Its parameters() is for some use of the user's own; the optimizer gets all of them, by name."""

    def parameters(self, recurse=True):
        return self.head.parameters(recurse)


class Traced(Net):
    def __init__(self):
        super().__init__()
        self.body = torch.jit.trace(self.body, torch.zeros(2, 3))


class Walks(Net):
    def named_parameters(self, *args, **kwargs):
        yield from super().named_parameters(*args, **kwargs)
        yield from vars(self).get("more", {}).items()


def replace_weight(net):
    net.head.weight = nn.Parameter(net.head.weight.detach().clone())


def add_module(net):
    net.body.append(nn.Tanh())


def swap(net):
    net.body[0], net.head = net.head, net.body[0]


def freeze(net):
    net.head.bias.requires_grad_(False)


def drop_bias(net):
    net.head.bias = None


def new_dict(net):
    net._modules = dict(net._modules)
    net.head = nn.Linear(4, 2)


def add_to_own_walk(net):
    net.__dict__["more"] = {"x": nn.Parameter(torch.zeros(2))}


@pytest.mark.parametrize("change", [replace_weight, add_module, swap, freeze, drop_bias, new_dict])
@pytest.mark.parametrize("kind", [Net, Own, Walks])
def test_every_change_is_seen(kind, change):
    net = kind()
    roster = Roster(net)
    assert roster.stands()
    change(net)
    assert not roster.stands()
    assert Roster(net).stands()


def test_a_walk_of_the_models_own_is_followed():
    net = Walks()
    roster = Roster(net)
    add_to_own_walk(net)
    assert not roster.stands()


def test_values_are_no_change():
    net = Net()
    roster = Roster(net)
    with torch.no_grad():
        net.head.weight.zero_()
    net.eval()
    assert roster.stands()


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("exactness", ["math", "bits"])
@pytest.mark.parametrize("kind", [Own, Traced])
def test_all_named_parameters_are_trained_as_by_hand(ranks, kind, exactness, size):
    job = kway.Job(
        model=kind, loss=nn.CrossEntropyLoss(), optimizer=partial(torch.optim.SGD, lr=0.5), data=(X, Y),
        batch_size=6, shuffle=False, precision="fp64",
    )  # fmt: skip
    run = kway.train(
        job,
        devices=f"cpu:{size}",
        strategy="data",
        epochs=1,
        exactness=exactness,
        shards=2,
        ranks=ranks,
        echo=False,
    )
    net = kind().double()
    for start in (0, 6):
        nn.functional.cross_entropy(net(X[start : start + 6]), Y[start : start + 6]).backward()
        with torch.no_grad():
            for _, parameter in net.named_parameters():
                parameter.sub_(0.5 * parameter.grad)
                parameter.grad = None
    for name, value in run.model.state_dict().items():
        torch.testing.assert_close(value, net.state_dict()[name], rtol=0, atol=1e-12)
