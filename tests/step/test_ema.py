"""The moving average of parameters against closed forms and plain torch."""

import pytest
import torch
from torch import nn

from kway.step.ema import MovingAverage


def averages(average):
    with average.swapped_in():
        return {name: value.detach().clone() for name, value in average.model.named_parameters()}


def moved(model, by):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(by)


@pytest.mark.parametrize("decay", [0.999, 0.9, 0.5, 0.1, 1e-9])
def test_the_recurrence(decay):
    model = nn.Linear(3, 2).double()
    right = {name: value.detach().clone() for name, value in model.named_parameters()}
    average = MovingAverage(model, decay)
    for step in range(5):
        moved(model, 0.5 * step)
        average.update()
        right = {n: decay * right[n] + (1 - decay) * value.detach() for n, value in model.named_parameters()}
        for name, value in averages(average).items():
            torch.testing.assert_close(value, right[name], rtol=0, atol=1e-14)


def test_it_starts_from_the_initial_weights_and_does_not_share_their_memory():
    model = nn.Linear(2, 1)
    start = model.weight.detach().clone()
    average = MovingAverage(model, 0.9)
    moved(model, 1.0)
    assert torch.equal(averages(average)["weight"], start)
    average.restart()
    assert torch.equal(averages(average)["weight"], start + 1)


def test_swapping_gives_back_every_bit_and_the_same_tensors():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    before = {
        name: (value, value.detach().clone()) for name, value in model.state_dict(keep_vars=True).items()
    }
    average = MovingAverage(model, 0.3)
    moved(model, 0.1)
    average.update()
    live = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match="expected 2D"), average.swapped_in():
        model[1](torch.zeros(3))
    for name, value in model.state_dict(keep_vars=True).items():
        assert value is before[name][0]
        assert torch.equal(value, live[name])
        assert value.requires_grad == before[name][0].requires_grad


def test_what_does_not_move_keeps_its_bits():
    model = nn.Linear(50, 50)
    start = model.weight.detach().clone()
    average = MovingAverage(model, 0.999)
    for _ in range(20):
        average.update()
    assert torch.equal(averages(average)["weight"], start)


def test_complex_parameters_move_in_both_parts():
    model = nn.Module()
    model.w = nn.Parameter(torch.tensor([1 + 1j, 2 - 1j], dtype=torch.complex128))
    average = MovingAverage(model, 0.75)
    moved(model, 4 - 8j)
    average.update()
    assert averages(average)["w"].tolist() == [2 - 1j, 3 - 3j]


def test_halves_are_averaged_in_single_precision():
    model = nn.Module()
    model.w = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    average = MovingAverage(model, 0.999)
    moved(model, 1.0)
    for _ in range(1000):
        average.update()
    # Steps of at most 0.001 would be lost between two bfloat16 numbers, 1 and 1.0078.
    assert averages(average)["w"].item() == pytest.approx(2 - 0.999**1000, rel=0.005)
    assert model.w.dtype == torch.bfloat16


def test_tied_integer_and_mixed_parameters():
    model = nn.Module()
    model.a = nn.Parameter(torch.zeros(2))
    model.tied = model.a
    model.wide = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    model.table = nn.Parameter(torch.tensor([3]), requires_grad=False)
    average = MovingAverage(model, 0.5)
    moved(model, 1)
    average.update()
    found = averages(average)
    assert {name: value.tolist() for name, value in found.items()} == {
        "a": [0.5] * 2,
        "wide": [0.5],
        "table": [4],
    }
    with average.swapped_in():
        assert model.tied.tolist() == [0.5, 0.5]


def test_parameters_that_come_go_and_change_shape():
    model = nn.Module()
    model.a, model.b = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    average = MovingAverage(model, 0.5)
    moved(model, 1)
    average.update()
    model.a = nn.Parameter(torch.tensor([2.5]))  # replaced: goes on from the average of 0.5
    model.c = nn.Parameter(torch.tensor([7.0]))  # added: has no average yet
    del model.b
    assert averages(average)["c"].item() == 7.0
    average.update()
    assert {name: value.item() for name, value in averages(average).items()} == {"a": 1.5, "c": 7.0}
    model.a = nn.Parameter(torch.ones(2, 2))
    assert torch.equal(averages(average)["a"], torch.ones(2, 2))
    average.update()
    moved(model, 1)
    average.update()
    assert torch.equal(averages(average)["a"], torch.full((2, 2), 1.5))
