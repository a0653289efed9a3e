"""Strides of inputs whose sizes leave open in which memory format they are."""

import pytest
import torch
from torch import nn

from kway.step.formats import as_weights_are


def net(last=True, three=False):
    kind = nn.Conv3d if three else nn.Conv2d
    model = nn.Sequential(kind(1, 2, 3), kind(2, 4, 3), nn.Flatten(), nn.LazyLinear(2))
    model(torch.zeros(1, 1, *[6] * (3 if three else 2)))
    return model.to(memory_format=torch.channels_last_3d if three else torch.channels_last) if last else model


def test_images_of_one_channel_get_the_strides_of_the_weights():
    images = torch.arange(72.0).view(2, 1, 6, 6)
    laid = as_weights_are(net())({"x": images, "y": torch.arange(2)})
    assert laid["x"].stride() == (36, 1, 6, 1)
    assert laid["x"].data_ptr() == images.data_ptr()
    assert not laid["x"]._is_view()
    assert torch.equal(laid["x"], images)
    assert laid["y"].stride() == (1,)
    again = as_weights_are(net())(laid["x"])
    assert again is laid["x"]


def test_volumes_too():
    laid = as_weights_are(net(three=True))(torch.zeros(2, 1, 6, 6, 6))
    assert laid.stride() == (216, 1, 36, 6, 1)


@pytest.mark.parametrize(
    "images",
    [
        torch.zeros(2, 3, 6, 6),
        torch.zeros(2, 1, 6, 12)[..., ::2],
        torch.zeros(2, 1, 6, 6, requires_grad=True),
        torch.zeros(2, 36),
    ],
    ids=["three channels", "gaps", "gradient", "no images"],
)
def test_what_sizes_leave_no_choice_of_stays_as_it_is(images):
    assert as_weights_are(net())(images) is images


def test_where_weights_are_contiguous_nothing_changes():
    images = torch.zeros(2, 1, 6, 6)
    assert as_weights_are(net(last=False))(images) is images
