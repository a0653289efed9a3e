"""Strides of images whose sizes leave open in which memory format they are, where convolutions read them."""

import copy
import pickle
from contextlib import ExitStack

import pytest
import torch
from torch import nn

from kway.step.formats import follow_weights
from kway.step.losses import rule_for


class Seen(nn.Module):
    """A model that keeps the strides which its convolutions hand to torch."""

    def __init__(self, kind=nn.Conv2d, channels=1, last=True):
        super().__init__()
        three = kind is nn.Conv3d
        self.first, self.second = kind(channels, 2, 3), kind(2, 1, 3)
        if last:
            self.to(memory_format=torch.channels_last_3d if three else torch.channels_last)

    def forward(self, images):
        return self.second(self.first(images))


def strides(model, images, monkeypatch):
    """Return the strides that the first convolution computes with."""
    seen = []
    kind = type(model.first)
    plain = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, x: seen.append(x.stride()) or plain(self, x))
    with ExitStack() as undo:
        follow_weights(model, undo)
        found = model(images)
    assert not {"forward"} & vars(model.first).keys()
    assert torch.equal(found, model(images))
    return seen[0]


def test_images_of_one_channel_get_the_strides_of_the_weights(monkeypatch):
    images = torch.arange(72.0).view(2, 1, 6, 6)
    assert strides(Seen(), images, monkeypatch) == (36, 1, 6, 1)
    assert images.stride() == (36, 36, 6, 1)


def test_volumes_too(monkeypatch):
    assert strides(Seen(nn.Conv3d), torch.rand(2, 1, 6, 6, 6), monkeypatch) == (216, 1, 36, 6, 1)


@pytest.mark.parametrize(
    "images",
    [
        torch.rand(2, 1, 6, 12)[..., ::2],
        torch.rand(2, 1, 6, 6, requires_grad=True),
        torch.rand(1, 6, 6),
        torch.rand(2, 1, 6, 6).to(memory_format=torch.channels_last),
    ],
    ids=["gaps", "gradient", "one image", "already"],
)
def test_what_has_no_choice_stays_as_it_is(images, monkeypatch):
    assert strides(Seen(), images, monkeypatch) == images.stride()


def test_several_channels_and_contiguous_weights_stay_as_they_are(monkeypatch):
    three = torch.rand(2, 3, 6, 6)
    assert strides(Seen(channels=3), three, monkeypatch) == three.stride()
    one = torch.rand(2, 1, 6, 6)
    assert strides(Seen(last=False), one, monkeypatch) == one.stride()


def test_a_copy_of_the_model_computes_with_its_own_weights():
    model, images = Seen(), torch.rand(2, 1, 6, 6)
    with ExitStack() as undo, torch.no_grad():
        follow_weights(model, undo)
        other = copy.deepcopy(model)
        other.first.weight.zero_()
        other.first.bias.zero_()
        assert other.first(images).abs().max() == 0
        assert model.first(images).abs().max() > 0
    with torch.no_grad():
        assert "forward" not in vars(model.first)


def test_what_is_pickled_meanwhile_can_be_read_afterwards():
    model, images = Seen(), torch.rand(2, 1, 6, 6)
    with ExitStack() as undo:
        follow_weights(model, undo)
        written, other = pickle.dumps(model), copy.deepcopy(model)
    for found in (pickle.loads(written), pickle.loads(pickle.dumps(other)), other):
        assert torch.equal(found(images), model(images))
        assert found.first.forward.__self__ is found.first


def test_a_compiler_takes_it_as_part_of_the_model():
    model, images = Seen(), torch.rand(2, 1, 6, 6)
    torch._dynamo.reset()
    with ExitStack() as undo:
        follow_weights(model, undo)
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        compiled(images).sum().backward()
        found = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    model(images).sum().backward()
    for one, parameter in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(one, parameter.grad)


@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last])
def test_gradients_of_scores_lie_as_the_scores_do(form):
    scores = torch.randn(2, 4, 3, 3).contiguous(memory_format=form).requires_grad_()
    target = torch.randint(4, (2, 3, 3))
    total, _ = rule_for(nn.CrossEntropyLoss(), torch.device("cpu"))(scores, target, 2)
    # Not ``grad``, which torch lays out as the leaf: what a model's own backward pass is given.
    (given,) = torch.autograd.grad(total, scores)
    assert given.stride() == scores.stride()
