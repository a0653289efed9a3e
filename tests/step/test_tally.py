import math

import pytest
import torch

from kway.comm.group import Group
from kway.errors import UsageError
from kway.step.tally import Tally, accuracy, mean, measure

CPU = torch.device("cpu")


def test_sums_and_weights_add_in_float64():
    tally = Tally(["a", "b"], CPU)
    for value in (1e8, 1.0, 1e-8):
        tally.add("b", torch.tensor(value, dtype=torch.float64), torch.tensor(1))
    assert tally.result(Group()) == {"a": (0.0, 0.0), "b": (1e8 + 1.0 + 1e-8, 3.0)}


def test_a_mean_of_nothing_is_no_number():
    assert mean((6.0, 4.0)) == 1.5
    assert math.isnan(mean((0.0, 0.0)))


def measured(metric, samples=4):
    tally = Tally(["m"], CPU)
    measure({"m": metric}, torch.arange(4.0), torch.arange(4.0) * 2, samples, tally)
    return tally.result(Group())["m"]


def test_what_a_metric_may_return():
    assert measured(lambda output, target: target) == (12.0, 4.0)
    assert measured(lambda output, target: target.view(2, 2)) == (12.0, 4.0)
    assert measured(lambda output, target: (target.sum(), 3)) == (12.0, 3.0)
    assert measured(lambda output, target: target.mean()) == (12.0, 4.0)
    assert measured(lambda output, target: 0.5) == (2.0, 4.0)
    assert measured(lambda output, target: output > 0) == (3.0, 4.0)
    for wrong in ("text", None, {"a": 1}):
        with pytest.raises(UsageError, match="'m' returned a"):
            measured(lambda output, target, wrong=wrong: wrong)


def test_accuracy_of_classes_and_probabilities_and_pixels():
    output = torch.tensor([[0.1, 0.9], [0.8, 0.2], [0.3, 0.7]])
    assert accuracy(output, torch.tensor([1, 1, 1])).tolist() == [1.0, 0.0, 1.0]
    assert accuracy(output, torch.tensor([[0.0, 1.0], [1.0, 0.0], [1.0, 0.0]])).tolist() == [1.0, 1.0, 0.0]
    pixels = torch.zeros(2, 3, 2, 2)
    pixels[:, 1] = 1.0
    assert accuracy(pixels, torch.ones(2, 2, 2)[:].long()).shape == (2, 2, 2)


def own_numbers(context):
    tally = Tally(["a", "b"], CPU)
    tally.add("b", torch.tensor(float(context.world.rank + 1)), torch.tensor(2.0 * context.world.rank))
    return tally.result(Group(context.world.rank, context.world.size))


def test_ranks_add_by_name(ranks):
    assert ranks.run(own_numbers, size=3) == [{"a": (0.0, 0.0), "b": (6.0, 6.0)}] * 3
