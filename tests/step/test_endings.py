"""A loss and what becomes of its sum and weight are one graph for a compiler, and the same numbers."""

import pytest
import torch
from torch import nn

from kway.errors import UsageError
from kway.step import endings
from kway.step.losses import rule_for

G = torch.Generator().manual_seed(0)
OUTPUT = torch.randn(6, 5, generator=G, dtype=torch.float64)
LABELS = torch.tensor([0, 4, 2, -100, 1, 1])
SHARES = torch.rand(6, 5, generator=G, dtype=torch.float64)
LOSSES = [
    (nn.CrossEntropyLoss(), LABELS),
    (nn.CrossEntropyLoss(weight=torch.rand(5, generator=G), label_smoothing=0.1), LABELS),
    (nn.CrossEntropyLoss(reduction="sum"), LABELS),
    (nn.CrossEntropyLoss(), SHARES),
    (nn.MSELoss(), SHARES),
    (nn.KLDivLoss(reduction="batchmean"), SHARES),
    (nn.BCEWithLogitsLoss(pos_weight=torch.rand(5, generator=G)), SHARES),
]


def computed(rule, target, ending):
    output = OUTPUT.clone().requires_grad_()
    first, second = rule(output, target, 6, ending, 0.25)
    first.backward()
    assert not second.requires_grad
    return first.detach(), second, output.grad


@pytest.mark.parametrize(("loss", "target"), LOSSES)
@pytest.mark.parametrize("ending", [endings.scaled, endings.mean, endings.plain])
def test_a_compiler_sees_the_whole_of_it(loss, target, ending):
    plain = rule_for(loss, torch.device("cpu"), torch.float64)
    traced = rule_for(loss, torch.device("cpu"), torch.float64)
    torch._dynamo.reset()
    traced.summed = torch.compile(traced.summed, backend="aot_eager", fullgraph=True, dynamic=False)
    for found, wanted in zip(computed(traced, target, ending), computed(plain, target, ending), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-14)


def test_endings_of_a_weight_of_nothing():
    total = torch.tensor(0.0, requires_grad=True)
    objective, numbers = endings.mean(total, torch.tensor(0.0), 1.0)
    objective.backward()
    assert (objective.item(), total.grad.item()) == (0.0, 1.0)
    assert numbers[0].isnan()
    assert numbers[1:].tolist() == [0.0, 0.0]


def test_a_weight_that_is_no_number_makes_a_sum_none():
    objective, numbers = endings.plain(torch.tensor(2.0), torch.tensor(float("nan")), 1.0)
    assert objective.item() == 2.0
    assert numbers[0].isnan()
    assert numbers[2].item() == 2.0


@pytest.mark.parametrize(
    ("total", "weight"), [(OUTPUT.sum(1), 6), (OUTPUT.sum().view(1), 4), (OUTPUT.sum(), torch.ones(6))]
)
def test_a_pair_of_more_than_two_numbers_is_an_error(total, weight):
    with pytest.raises(UsageError, match=r"the model returned a pair of shapes .* must be single numbers"):
        rule_for(None, torch.device("cpu"))((total, weight), None, 6)


def test_labels_that_are_no_tensor_are_torch_s_to_refuse():
    with pytest.raises(TypeError, match="must be Tensor"):
        rule_for(nn.CrossEntropyLoss(), torch.device("cpu"))(OUTPUT, [0] * 6, 6)
