import numpy as np
import pytest
import torch

from kway.data.images import Images
from kway.errors import DataError

PIXELS = torch.arange(3 * 2 * 2 * 2, dtype=torch.uint8).view(3, 2, 2, 2)
LABELS = torch.tensor([0, 2, 1])


def test_pixels_become_floats_from_0_to_1_when_taken():
    pixels = PIXELS.clone()
    pixels[1, 0, 0, 0] = 255
    images = Images("set", pixels, LABELS, 3)
    taken, labels = images.take(np.array([1, 1, 0]))
    assert (taken.dtype, taken.shape, labels.tolist()) == (torch.float32, (3, 2, 2, 2), [2, 2, 0])
    assert torch.equal(taken, pixels[[1, 1, 0]].float() / 255)
    assert taken.max() == 1
    assert images.images.dtype == torch.uint8
    assert len(images) == 3
    assert images[2][1] == 1


@pytest.mark.parametrize(
    ("images", "labels", "text"),
    [
        (PIXELS.float(), LABELS, "float32"),
        (PIXELS[0], LABELS, r"\(2, 2, 2\)"),
        (PIXELS, LABELS[:2], r"\(2,\).*3 images"),
        (PIXELS, LABELS.int(), "int32"),
        (PIXELS, LABELS + 1, "from 1 to 3"),
        (PIXELS, LABELS - 1, "from -1 to 1"),
        (PIXELS[:0], LABELS[:0], "0 images"),
    ],
)
def test_wrong_images_are_refused_with_what_was_found(images, labels, text):
    with pytest.raises(DataError, match=text):
        Images("set", images, labels, 3)
