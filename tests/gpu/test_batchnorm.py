"""Global batch statistics by CUDA's kernels against torch's own layer on the whole batch, on one GPU.

Shares are computed one after the other. What ranks would exchange is kept from one pass to the next: forward
statistics stand after the first pass, backward sums after the second, so the third is what ranks compute.
"""

import pytest
import torch
from torch import nn

from kway.comm.group import Group
from kway.step.batchnorm import global_forward
from kway.step.presence import Presence

pytestmark = pytest.mark.gpu

DEVICE = "cuda:0"
PASSES = 3
LAYERS = {
    "vectors": (nn.BatchNorm1d, ()),
    "sequences": (nn.BatchNorm1d, (7,)),
    "images": (nn.BatchNorm2d, (6, 5)),
    "volumes": (nn.BatchNorm3d, (3, 4, 2)),
}
SPLITS = [(4, 1), (5, 0), (0, 5), (1, 1, 3), (3, 0, 2)]


class Replayed(Group):
    """Rank ``rank`` of a group whose other ranks are heard from an earlier pass."""

    def __init__(self, rank, size, heard):
        super().__init__(rank, size)
        self.heard, self.calls = heard, 0

    def stack(self, tensor, of=""):
        said = self.heard.setdefault(self.calls, {})
        self.calls += 1
        said[self.rank] = tensor.detach().clone()
        return torch.stack([said.get(rank, said[self.rank]) for rank in range(self.size)])


def in_shares(layer, x, dy, split):
    """Run shares of ``x``; return y, dx, the summed gradients of weight and bias, and each rank's buffers."""
    heard = {}
    bounds = [sum(split[:rank]) for rank in range(len(split) + 1)]
    start = {name: value.clone() for name, value in layer.state_dict().items()}
    for _ in range(PASSES):
        outs, grads, buffers = {}, {}, []
        layer.zero_grad()
        # Those with samples first: a group that has heard of no sample yet has no statistics.
        for rank, count in sorted(enumerate(split), key=lambda pair: -pair[1]):
            layer.load_state_dict(start)
            # A rank without samples computes a ghost that must not count.
            rows = slice(bounds[rank], bounds[rank + 1]) if count else slice(0, 1)
            own = like(x[rows], x).requires_grad_()
            presence = Presence()
            presence.counts = count > 0
            out = global_forward(layer, own, Replayed(rank, len(split), heard), presence, "norm")
            out.backward(like(dy[rows], x) if count else torch.zeros_like(out))
            buffers.append({name: value.clone() for name, value in layer.named_buffers()})
            if count:
                outs[rank], grads[rank] = out.detach(), own.grad
    summed = {name: p.grad.clone() for name, p in layer.named_parameters()}
    whole_y, whole_dx = (torch.cat([found[rank] for rank in sorted(found)]) for found in (outs, grads))
    return whole_y, whole_dx, summed, buffers


def like(part, whole):
    """Copy ``part`` in the memory format of ``whole``: a slice of channels_last images need not look so."""
    last = whole.dim() == 4 and not whole.is_contiguous()
    return part.detach().clone(memory_format=torch.channels_last if last else torch.contiguous_format)


def case(kind, dtype, *, last=False, affine=True, momentum=0.1, seed=0):
    """Make a layer and a batch of five with a mean far from zero, and a gradient for its output."""
    torch.manual_seed(seed)
    make, sides = LAYERS[kind]
    layer = make(6, affine=affine, momentum=momentum)
    if affine:
        nn.init.normal_(layer.weight)
        nn.init.normal_(layer.bias)
    x, dy = torch.randn(2, 5, 6, *sides, dtype=torch.float64)
    x = x * 2 + 3
    layer, x, dy = layer.to(DEVICE, dtype), x.to(DEVICE, dtype), dy.to(DEVICE, dtype)
    if last:
        x, dy = (value.contiguous(memory_format=torch.channels_last) for value in (x, dy))
    return layer, x, dy


def whole(layer, x, dy):
    """What torch's own layer gives for the whole batch."""
    own = x.detach().clone().requires_grad_()
    layer.zero_grad()
    out = layer(own)
    out.backward(dy)
    grads = {name: p.grad.clone() for name, p in layer.named_parameters()}
    return out.detach(), own.grad, grads, {name: value.clone() for name, value in layer.named_buffers()}


def compare(kind, dtype, split, tolerance, **options):
    layer, x, dy = case(kind, dtype, **options)
    reference, _, _ = case(kind, dtype, **options)
    y, dx, grads, buffers = in_shares(layer, x, dy, split)
    y0, dx0, grads0, buffers0 = whole(reference, x, dy)

    def close(got, want):
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance * 10)

    close(y, y0)
    close(dx, dx0)
    assert grads.keys() == grads0.keys()
    for name, value in grads0.items():
        close(grads[name], value)
    for own in buffers:
        assert own.keys() == buffers0.keys()
        for name, value in buffers0.items():
            close(own[name], value)


@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)], ids=str)
def test_shares_of_any_size_give_the_whole_batch(kind, dtype, tolerance, split):
    compare(kind, dtype, split, tolerance)


@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)], ids=str)
def test_channels_last_images_give_the_whole_batch(dtype, tolerance, split):
    compare("images", dtype, split, tolerance, last=True)


def test_channels_last_stays_channels_last():
    layer, x, dy = case("images", torch.float32, last=True)
    y, dx, _, _ = in_shares(layer, x, dy, (5, 0))
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert dx.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("options", [{"affine": False}, {"momentum": None}], ids=str)
def test_layers_without_weights_and_with_a_plain_average_agree(options):
    compare("images", torch.float64, (4, 1), 1e-12, **options)


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("last", [False, True])
def test_half_precision_input_has_statistics_in_full_precision(half, last):
    """As under autocast: activations in half precision, weights and buffers in float32."""
    layer, x, dy = case("images", torch.float32, last=last)
    x, dy = x.to(half), dy.to(half)
    reference, _, _ = case("images", torch.float32, last=last)
    y, dx, _, buffers = in_shares(layer, x, dy, (4, 1))
    y0, dx0, _, buffers0 = whole(reference, x.float(), dy.float())
    assert y.dtype == dx.dtype == half
    torch.testing.assert_close(y.float(), y0, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(dx.float(), dx0, rtol=2e-2, atol=2e-2)
    for own in buffers:
        torch.testing.assert_close(own["running_var"], buffers0["running_var"], rtol=1e-4, atol=1e-4)


def test_a_large_mean_does_not_eat_the_variance():
    torch.manual_seed(0)
    layer = nn.BatchNorm2d(3).to(DEVICE)
    x = (torch.randn(8, 3, 9, 9, dtype=torch.float64) + 1000).to(DEVICE, torch.float32)
    y, _, _, _ = in_shares(layer, x, torch.ones_like(x), (5, 3))
    exact = nn.functional.batch_norm(x.double(), None, None, training=True)
    assert (y.double() - exact).abs().max() < 2e-3
