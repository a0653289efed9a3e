"""A mean over dimension 0 adds up where samples, or rows of samples, lie there, and is refused elsewhere."""

from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from kway.errors import RefusedError
from kway.step.losses import rule_for

CPU = torch.device("cpu")
LOSS = nn.KLDivLoss(reduction="batchmean")
DRAW = torch.Generator().manual_seed(0)


def drawn(*shape):
    output, target = torch.randn(2, *shape, generator=DRAW, dtype=torch.float64)
    return F.log_softmax(output, -1), torch.softmax(target, -1)


def test_several_rows_of_a_sample_add_up():
    output, target = drawn(4 * 9, 4)
    rule = rule_for(LOSS, CPU)
    parts = [rule(output[4 * a : 4 * b], target[4 * a : 4 * b], b - a) for a, b in pairwise((0, 5, 9))]
    total, weight = (sum(each) for each in zip(*parts, strict=True))
    torch.testing.assert_close(total / weight, LOSS(output, target), rtol=1e-13, atol=0)


def test_samples_that_do_not_come_first_are_refused():
    with pytest.raises(RefusedError, match=r"shape \(7, 3, 4\) of 3 samples"):
        rule_for(LOSS, CPU)(*drawn(7, 3, 4), 3)


def test_samples_that_are_folded_into_rows_add_up_and_sizes_that_do_not_tell_are_a_doubt():
    rule = rule_for(LOSS, CPU)
    rule(*drawn(8, 5, 5), 2)
    assert rule.doubts == []
    rule(*drawn(4, 4, 3), 4)
    rule(*drawn(4, 4, 3), 4)
    assert len(rule.doubts) == 1
    assert "batchmean" in rule.doubts[0]
    with pytest.raises(RefusedError, match=r"shape \(8, 4, 3\) of 4 samples"):
        rule(*drawn(8, 4, 3), 4)
