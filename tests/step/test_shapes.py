"""What is said where output and target are not of one shape. All pairs of shapes are in test_losses.py."""

import pytest
import torch

from kway.errors import UsageError
from kway.step.shapes import check_same_shape

LOSS = r"the loss cross entropy \(nn.CrossEntropyLoss\(\), --loss cross-entropy\)"


@pytest.mark.parametrize(
    ("target", "said"),
    [
        (torch.arange(5), f"; for classes take {LOSS}; else let"),
        (
            torch.arange(5).view(5, 1),
            rf"; for classes take {LOSS}, of int64 labels of shape \(5,\); else let",
        ),
        (torch.arange(5).byte(), rf"; for classes take {LOSS}, of int64 labels of shape \(5,\); else let"),
        (torch.ones(5), rf"; for classes make the labels integers .* and take {LOSS}; else let"),
    ],
)
def test_only_labels_that_are_no_integers_are_to_become_some(target, said):
    with pytest.raises(UsageError, match=said):
        check_same_shape("MSELoss", torch.rand(5, 3), target)
