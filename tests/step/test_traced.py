"""Batch normalisation over ranks that a compiler sees: the numbers of one device, the collectives of an eager step."""

from contextlib import nullcontext
from functools import partial
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import kway
from kway.comm.operation import GatherOperation
from kway.devices.compilers import missing
from kway.step import compiled

pytestmark = pytest.mark.skipif(missing("cpu") is not None, reason=f"torch.compile: {missing('cpu')}")

G = torch.Generator().manual_seed(0)
X, Y = torch.randn(22, 3, 6, 6, generator=G), torch.arange(22) % 2
compile_of_torch = torch.compile
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


class Block(nn.Module):
    """Two branches, each normalised: which comes first is the compiler's to choose."""

    def __init__(self, inputs, outputs, **options):
        super().__init__()
        self.main, self.beside = (nn.Conv2d(inputs, outputs, 2) for _ in range(2))
        self.norm, self.other = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs, **options)

    def forward(self, x):
        return torch.relu(self.norm(self.main(x)) + self.other(self.beside(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(
            Block(3, 4, affine=False), Block(4, 4, momentum=0.3, track_running_stats=False)
        )
        self.last = nn.Linear(4, 2)

    def forward(self, x):
        return self.last(self.blocks(x).mean((2, 3)))


class Broken(Net):
    """Compiled in two parts."""

    def forward(self, x):
        x = self.blocks[0](x)
        torch._dynamo.graph_break()
        return self.last(self.blocks[1](x).mean((2, 3)))


class Again(Net):
    """Computes its second block once more in backward."""

    def forward(self, x):
        x = self.blocks[0](x)
        x = checkpoint(self.blocks[1], x, use_reentrant=False)
        return self.last(x.mean((2, 3)))


class Vectors(nn.Module):
    """Two branches without a convolution: few kernels to be made."""

    def __init__(self):
        super().__init__()
        self.main, self.beside, self.last = nn.Linear(108, 4), nn.Linear(108, 4), nn.Linear(4, 2)
        self.norm, self.other = nn.BatchNorm1d(4), nn.BatchNorm1d(4)

    def forward(self, x):
        x = x.flatten(1)
        return self.last(torch.relu(self.norm(self.main(x)) + self.other(self.beside(x))))


class Half(nn.Module):
    """Constant for batches of the first classes alone, which some ranks have and others do not."""

    def forward(self, scores, target):
        if not bool(target.any()):
            return scores.new_zeros(()).sum()
        return nn.functional.cross_entropy(scores, target, reduction="sum") / len(target)


def job(model=Net, **more):
    more = {"data": (X, Y), "batch_size": 8, "precision": "fp64", "loss": nn.CrossEntropyLoss(), **more}
    return kway.Job(model, optimizer=SGD, **more)


def steps(p):
    """Take the steps of two epochs; return the state then, by name."""
    for epoch in range(2):
        for batch in p.batches(epoch):
            p.step(batch)
    return {name: value.detach().clone() for name, value in p.model.state_dict().items()}


def traced_alone(function, dynamic, options):
    """What a compiler sees, without the minutes that its kernels take: their order is a matter of one test."""
    return compile_of_torch(function, dynamic=dynamic, backend="aot_eager")


def trained(context, model, more, kernels=False):
    """As on a GPU: what is compiled sees the layers. Return the state, and what was gathered in which order."""
    gathered = []
    stack = GatherOperation._gathered

    def noted(self, tensor, after, of):
        gathered.append(of)
        return stack(self, tensor, after, of)

    with (
        mock.patch.object(compiled, "sees_norms", return_value=True),
        mock.patch.object(GatherOperation, "_gathered", noted),
        nullcontext() if kernels else mock.patch.object(torch, "compile", traced_alone),
        kway.parallel(job(model, **more), strategy="data", step_kind="compiled") as p,
    ):
        return steps(p), gathered


def of_one_device(model, more):
    with kway.parallel(job(model, **more), strategy="single", devices="cpu") as p:
        return steps(p)


def check(found, expected):
    for state, _ in found:
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-11, msg=name)


NAMES = [f"blocks.{block}.{norm}" for block in range(2) for norm in ("norm", "other")]


def test_layers_are_seen_and_compute_what_one_device_does(ranks):
    # 22 samples by 8: shares of 3 and 3 in the end.
    found = ranks.run(trained, Net, {})
    check(found, of_one_device(Net, {}))
    for _, gathered in found:
        assert gathered == [*NAMES, *reversed(NAMES)] * 6


def test_a_rank_without_samples_meets_those_that_see_the_layers(ranks):
    # The last batch has two samples.
    more = {"data": (X[:18], Y[:18])}
    found = ranks.run(trained, Net, more, size=4)
    check(found, of_one_device(Net, more))
    seen = [len(gathered) for _, gathered in found]
    assert max(seen) == 6 * 2 * len(NAMES)
    assert min(seen) == 4 * 2 * len(NAMES)


@pytest.mark.parametrize("model", [Broken, Again])
def test_a_model_in_parts_computes_what_one_device_does(ranks, model):
    check(ranks.run(trained, model, {}), of_one_device(model, {}))


# Each rank compiles kernels, which takes long where others have the processors.
@pytest.mark.timeout(300)
def test_a_rank_whose_loss_is_a_constant_takes_part_in_backward(ranks):
    # Sorted, so that the first rank's share has the first class alone.
    order = torch.argsort(Y[:8], stable=True)
    more = {"data": (X[order], Y[order]), "loss": Half(), "shuffle": False}
    found = ranks.run(trained, Vectors, more, True, limit=240)
    for state, gathered in found:
        assert gathered == ["norm", "other", "other", "norm"] * 2
        for name, value in found[0][0].items():
            assert torch.equal(state[name], value)


def apart(context, away):
    """Return running means, and what is said, where the second rank's are off by a part ``away`` of them."""
    said = []
    with (
        mock.patch.object(compiled, "sees_norms", return_value=True),
        mock.patch.object(torch, "compile", traced_alone),
        kway.parallel(job(Vectors), strategy="data", step_kind="compiled") as p,
    ):
        for batch in p.batches(0):
            p.step(batch)
        mean = p.model.norm.running_mean
        mean *= 1 + away * context.world.rank
        said = p.engine.equalise()
        return mean.clone(), said


@pytest.mark.parametrize(("away", "named"), [(1e-15, []), (1e-6, ["norm.running_mean"])])
def test_running_statistics_that_were_rounded_otherwise_come_to_one_value(ranks, away, named):
    (first, said), (second, _) = ranks.run(apart, away)
    assert torch.equal(first, second)
    assert said == named
