"""P02: bytes of weights, gradients and optimizer on each device, beside those of real tensors."""

import pytest
import torch
from torch import nn

from kway.cost.memory import ADAM, FP32, GRADIENTS, HALF, MASTER, MOMENTUM, OPTIMIZER, WEIGHTS, States
from kway.profiling.sizes import parameters_of

N = 64_000  # Embedding(1000, 64) tied to its head
STAGES = {
    "replicated": frozenset(),
    "optimizer": frozenset({OPTIMIZER}),
    "and gradients": frozenset({OPTIMIZER, GRADIENTS}),
    "all": frozenset({OPTIMIZER, GRADIENTS, WEIGHTS}),
}


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(1000, 64)
        self.head = nn.Linear(64, 1000, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens):
        return self.head(self.table(tokens))


def stepped(model, make):
    optimizer = make(model.parameters())
    model(torch.arange(4)).sum().backward()
    optimizer.step()
    return parameters_of(model, optimizer)


@pytest.mark.parametrize(
    ("ranks", "numbers"),
    [(2, (1_024_000, 768_000, 640_000, 512_000)), (4, (1_024_000, 640_000, 448_000, 256_000))],
)
def test_each_stage_splits_what_it_says(ranks, numbers):
    states = States.of(N)
    found = [sum(states.on_each(ranks, sharded).values()) for sharded in STAGES.values()]
    assert found == list(numbers)


def test_other_ways_to_train_have_their_own_multipliers():
    def total(**widths):
        return sum(States.of(N, **widths).on_each().values())

    assert total() == 16 * N
    mixed = {"width": HALF, "master_width": MASTER}
    assert total(**mixed, gradient_width=HALF) == 16 * N
    assert total(**mixed, gradient_width=FP32) == 18 * N
    assert total(optimizer_width=0) == 8 * N
    assert total(optimizer_width=MOMENTUM) == 12 * N
    assert sum(States.of(0, frozen=N).on_each().values()) == 4 * N
    assert sum(States.of(N // 2, frozen=N // 2).on_each().values()) == (16 + 4) * N // 2


def test_a_count_that_the_ranks_do_not_divide_is_padded():
    assert States.of(10).on_each(3, STAGES["all"]) == {"weights": 14, "gradients": 14, "optimizer": 27}


@pytest.mark.parametrize(
    ("make", "width"),
    [
        (torch.optim.AdamW, ADAM),
        (lambda held: torch.optim.SGD(held, lr=0.1), 0),
        (lambda held: torch.optim.SGD(held, lr=0.1, momentum=0.9), MOMENTUM),
    ],
)
def test_real_tensors_take_what_the_formula_says_and_tied_ones_count_once(make, width):
    sizes = stepped(Tied(), make)
    states = States.of(N, optimizer_width=width)
    assert (sizes["count"], sizes["bytes"], sizes["gradient_bytes"]) == (N, states.weights, states.gradients)
    assert sizes["optimizer_bytes"] == pytest.approx(states.optimizer, rel=0.01)


def test_what_is_frozen_has_neither_gradient_nor_state():
    model = nn.Sequential(nn.Embedding(1000, 64), nn.Linear(64, 10, bias=False))
    model[0].weight.requires_grad_(False)
    sizes = stepped(model, torch.optim.AdamW)
    states = States.of(640, frozen=N)
    assert (sizes["bytes"], sizes["gradient_bytes"]) == (states.weights, states.gradients)
    assert sizes["optimizer_bytes"] == pytest.approx(states.optimizer, rel=0.01)
