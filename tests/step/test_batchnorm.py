"""Batch normalisation over ranks is torch's on the whole batch: outputs, gradients, running statistics."""

import copy
import pickle
from contextlib import suppress
from functools import partial

import pytest
import torch
from torch import nn

import kway
from kway.comm.group import Group
from kway.step.batchnorm import global_statistics
from kway.step.presence import Presence

PARTS = {2: [[3, 2], [4, 1], [5, 0], [0, 5]], 3: [[2, 2, 1], [0, 5, 0], [1, 0, 4]]}


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 3 + 1.5


INPUTS = {
    "1d": (nn.BatchNorm1d, draw(5, 3)),
    "1d with length": (nn.BatchNorm1d, draw(5, 3, 4)),
    "2d": (nn.BatchNorm2d, draw(5, 3, 4, 2)),
    "channels last": (nn.BatchNorm2d, draw(5, 3, 4, 2).contiguous(memory_format=torch.channels_last)),
    "3d": (nn.BatchNorm3d, draw(5, 3, 2, 3, 2)),
    "sync": (nn.SyncBatchNorm, draw(5, 3, 4, 2)),
}
OPTIONS = [
    {},
    {"momentum": None},
    {"momentum": 0.37, "eps": 1e-2},
    {"affine": False},
    {"track_running_stats": False},
    {"affine": False, "track_running_stats": False, "momentum": None},
]
STEPS = 3


def layer_of(kind, options):
    layer = kind(3, **options).double()
    if layer.affine:
        with torch.no_grad():
            layer.weight.copy_(torch.tensor([0.5, -1.5, 2.0]))
            layer.bias.copy_(torch.tensor([0.1, 0.2, -3.0]))
    return layer


def steps(layer, batches, slopes, reduce=lambda gradient: gradient):
    """Run forward and backward; return outputs, gradients of x, and sums of the gradients of weight and bias."""
    found = {"y": [], "dx": []}
    for batch, slope in zip(batches, slopes, strict=True):
        x = batch.clone(memory_format=torch.preserve_format).requires_grad_()
        y = layer(x)
        y.backward(slope)
        found["y"].append(y.detach())
        found["dx"].append(x.grad)
    for name, parameter in layer.named_parameters():
        found[name] = reduce(parameter.grad)
    return found | {name: value.clone() for name, value in layer.named_buffers()}


def batches_of(x):
    return [x + step * x.square() for step in range(STEPS)], [
        draw(*x.shape, seed=9 + step) for step in range(STEPS)
    ]


def on_rank(context, layer, x, parts, training=True):
    """Normalise this rank's part of every batch; a rank without samples runs a ghost."""
    rank = context.world.rank
    start, count = sum(parts[:rank]), parts[rank]
    group, presence = Group(rank, context.world.size), Presence()
    presence.counts = count > 0

    def own(whole):
        return whole[start : start + count] if count else whole[:1] * 0 + 1e6

    batches, slopes = batches_of(x)
    slopes = [own(slope) if count else torch.zeros_like(slope[:1]) for slope in slopes]

    def reduce(gradient):
        return group.sum_((gradient if count else gradient * 0).clone())

    layer.train(training)
    with global_statistics(layer, group, presence):
        found = steps(layer, [own(batch) for batch in batches], slopes, reduce)
    if not count:
        found["y"] = [y[:0] for y in found["y"]]
        found["dx"] = [dx[:0] for dx in found["dx"]]
    return found


def on_rank_by_each(context, layer, x, cuts):
    """The same for each way to cut a batch, in one task: each has a layer of its own."""
    return [on_rank(context, copy.deepcopy(layer), x, parts) for parts in cuts]


def plain(kind, options, x, training=True):
    """Torch's own layer on the whole batch. SyncBatchNorm refuses the CPU: it is BatchNorm2d there."""
    kind = nn.BatchNorm2d if kind is nn.SyncBatchNorm else kind
    layer = layer_of(kind, options)
    layer.train(training)
    return steps(layer, *batches_of(x))


def check(found, expected, parts):
    for rank in found:
        for name in expected.keys() - {"y", "dx"}:
            assert rank[name].dtype == expected[name].dtype
            torch.testing.assert_close(
                rank[name], expected[name], rtol=1e-12, atol=1e-12, msg=f"{name} of {parts}"
            )
            assert torch.equal(rank[name], found[0][name])
    for name in ("y", "dx"):
        for step in range(STEPS):
            whole = torch.cat([rank[name][step] for rank in found])
            torch.testing.assert_close(whole, expected[name][step], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_training_equals_torch_on_the_whole_batch(ranks, name, options):
    kind, x = INPUTS[name]
    expected = plain(kind, options, x)
    for size, cuts in PARTS.items():
        by_rank = ranks.run(on_rank_by_each, layer_of(kind, options), x, cuts, size=size)
        for parts, found in zip(cuts, zip(*by_rank, strict=True), strict=True):
            check(found, expected, parts)


@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_evaluation_equals_torch_on_the_whole_batch(ranks, name, options):
    kind, x = INPUTS[name]
    expected = plain(kind, options, x, training=False)
    check(ranks.run(on_rank, layer_of(kind, options), x, [3, 2], False), expected, [3, 2])


def test_statistics_of_a_share_would_be_far_off():
    x = INPUTS["2d"][1]
    whole, part = plain(nn.BatchNorm2d, {}, x), plain(nn.BatchNorm2d, {}, x[:3])
    assert not torch.allclose(whole["running_mean"], part["running_mean"], atol=1e-3)
    assert not torch.allclose(whole["dx"][0][:3], part["dx"][0], atol=1e-3)


def in_single(context, layer, x, parts):
    start = sum(parts[: context.world.rank])
    own = x[start : start + parts[context.world.rank]]
    with global_statistics(layer, Group(context.world.rank, context.world.size), Presence()):
        y = layer(own)
    return y.detach(), layer.running_mean, layer.running_var


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision_keeps_its_dtypes_and_its_accuracy(ranks, dtype):
    x = draw(5, 3, 4, 2).to(dtype)
    layer = nn.BatchNorm2d(3)
    expected = copy.deepcopy(layer).double()
    y = expected(x.double())
    found = ranks.run(in_single, layer, x, [4, 1])
    whole = torch.cat([rank[0] for rank in found])
    assert whole.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(whole.double(), y.detach(), rtol=tolerance, atol=tolerance)
    for _, running_mean, running_var in found:
        assert running_mean.dtype == torch.float32
        torch.testing.assert_close(running_mean.double(), expected.running_mean, rtol=2e-3, atol=2e-3)
        torch.testing.assert_close(running_var.double(), expected.running_var, rtol=2e-3, atol=2e-3)


def test_a_large_mean_does_not_swallow_the_variance(ranks):
    x = draw(5, 3) + 1e6
    expected = plain(nn.BatchNorm1d, {}, x)["running_var"]
    exact = nn.BatchNorm1d(3).double()
    exact(x - 1e6)
    found = ranks.run(in_single, nn.BatchNorm1d(3).double(), x, [4, 1])
    torch.testing.assert_close(found[0][2], exact.running_var, rtol=1e-9, atol=0)
    assert expected.shape == found[0][2].shape


class OwnForward(nn.BatchNorm1d):
    def forward(self, x):
        return super().forward(x) + 1


class Plain(nn.BatchNorm1d):
    """A subclass that changes nothing."""


def test_a_layer_with_a_forward_of_its_own_is_refused_by_name():
    model = nn.Sequential(nn.Linear(3, 3), OwnForward(3))
    with (
        pytest.raises(kway.RefusedError, match=r"layer '1' \(OwnForward\)"),
        global_statistics(model, Group(0, 2), Presence()),
    ):
        pass
    assert "forward" not in vars(model[1])


def test_layers_are_given_back_as_they_were():
    model = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm2d(2), Plain(3))
    names = list(model.state_dict())
    with suppress(RuntimeError), global_statistics(model, Group(), Presence()):
        assert all("forward" in vars(layer) for layer in model)
        assert list(model.state_dict()) == names
        raise RuntimeError("stop")
    assert not any("forward" in vars(layer) for layer in model)
    assert list(pickle.loads(pickle.dumps(model)).state_dict()) == names


def test_a_wrong_shape_is_torch_s_own_error():
    layer = nn.BatchNorm2d(3)
    with global_statistics(layer, Group(), Presence()), pytest.raises(ValueError, match="expected 4D input"):
        layer(torch.ones(2, 3))


@pytest.mark.parametrize("shape", [(1, 3), (1, 3, 1, 1)])
def test_one_value_a_channel_in_the_whole_batch_is_an_error(shape):
    layer = (nn.BatchNorm1d if len(shape) == 2 else nn.BatchNorm2d)(3)
    with global_statistics(layer, Group(), Presence()):
        with pytest.raises(ValueError, match=r"the global batch has 1 .*on rank 0"):
            layer(torch.ones(shape))
        layer.eval()
        assert layer(torch.ones(shape)).shape == shape
    assert int(layer.num_batches_tracked) == 0


def test_one_sample_on_each_rank_is_enough(ranks):
    x = draw(2, 3)
    expected = nn.BatchNorm1d(3).double()
    y = expected(x)
    found = ranks.run(in_single, nn.BatchNorm1d(3).double(), x, [1, 1])
    torch.testing.assert_close(torch.cat([rank[0] for rank in found]), y.detach(), rtol=1e-12, atol=1e-12)


def test_a_frozen_layer_uses_what_it_has(ranks):
    """Half of the network in evaluation mode, as in fine-tuning: its statistics stay."""
    model = partial(frozen_net)
    x = draw(5, 3)
    job = kway.Job(
        model=model, loss=nn.MSELoss(), optimizer=partial(torch.optim.SGD, lr=0.1), data=(x, x), batch_size=5,
        precision="fp64",
    )  # fmt: skip
    run = kway.train(job, devices="cpu:2", epochs=2, ranks=ranks, echo=False)
    alone = kway.train(job, devices="cpu:1", epochs=2)
    for name, value in alone.model.state_dict().items():
        torch.testing.assert_close(run.model.state_dict()[name], value, rtol=0, atol=1e-12)
    assert int(run.model[0].num_batches_tracked) == 0
    assert int(run.model[2].num_batches_tracked) == 2


class Frozen(nn.BatchNorm1d):
    """Stays in evaluation mode."""

    def train(self, mode=True):
        return super().train(False)


def frozen_net():
    return nn.Sequential(Frozen(3), nn.Linear(3, 3), nn.BatchNorm1d(3))


class Routed(nn.Module):
    """Normalises the rows that are larger than 1 alone: none of the sample's, and of the ghost's ``ghosts``."""

    def __init__(self, ghosts):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.norm, self.last = nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2)
        self.ghosts = ghosts

    def forward(self, x):
        rows = self.layer(x).expand(4, 2)
        # What follows the rank follows, in a model, random numbers that each rank draws by itself.
        here = torch.arange(4) < (self.ghosts if torch.distributed.get_rank() else 0)
        normal = self.norm(rows[here])
        return torch.cat([self.last(normal), rows[~here]]).mean(0, keepdim=True)


@pytest.mark.parametrize("ghosts", [0, 1, 3])
def test_a_ghost_may_come_with_values_to_a_layer_that_no_sample_reaches(ranks, ghosts):
    """The rank with the sample has no row for the layer, and does not know what the other one's ghost has."""
    x = torch.ones(1, 2)
    job = kway.Job(
        model=partial(Routed, ghosts), loss=nn.MSELoss(), optimizer=partial(torch.optim.SGD, lr=0.1), data=(x, x),
        batch_size=1, precision="fp64",
    )  # fmt: skip
    run = kway.train(job, devices="cpu:2", epochs=2, ranks=ranks, echo=False)
    start = Routed(ghosts).double().state_dict()
    state = run.model.state_dict()
    assert int(state.pop("norm.num_batches_tracked")) == 2
    for name, value in state.items():
        assert value.isfinite().all()
        assert torch.equal(value, start[name]) == (not name.startswith("layer."))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_layers_in_half_precision_normalise_over_ranks(ranks, dtype):
    layer, x = nn.BatchNorm2d(3).to(dtype), draw(6, 3, 4, 4).to(dtype)
    expected = steps(copy.deepcopy(layer).float(), *([b.float() for b in part] for part in batches_of(x)))
    found = ranks.run(on_rank, layer, x, [4, 2], size=2)
    for step in range(STEPS):
        whole = torch.cat([rank["y"][step] for rank in found])
        assert whole.dtype == dtype
        torch.testing.assert_close(whole.float(), expected["y"][step], rtol=0.02, atol=0.05)


class ByName(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x):
        return self.norm(input=x)


def by_name(context, model, x):
    group = Group(context.world.rank, context.world.size)
    with global_statistics(model, group, Presence()):
        return model(x.chunk(2)[context.world.rank]).detach()


def test_the_input_may_be_handed_over_by_its_name(ranks):
    x = draw(6, 4)
    found = torch.cat(ranks.run(by_name, ByName().double(), x, size=2))
    torch.testing.assert_close(found, ByName().double()(x).detach())
