"""Gradients of ranks: sums, those that nobody has, and the scalars that travel with them."""

import pytest
import torch
from torch import nn

from kway.comm.group import Group
from kway.comm.reduce import GradientReducer

DTYPES = (torch.float32, torch.float64, torch.complex64, torch.bfloat16)


def reduced(context, present, counts):
    """Rank r has the gradient (r + 1) * (index + 1) where ``present`` says so."""
    rank = context.world.rank
    parameters = [
        nn.Parameter(torch.zeros(2, 3 - index % 2, dtype=dtype)) for index, dtype in enumerate(DTYPES)
    ]
    reducer = GradientReducer(parameters, Group(rank, context.world.size), scalars=3)
    results = []
    for _ in range(2):  # the second time, what the first left behind must not be seen
        for index, parameter in enumerate(parameters):
            there = present[rank][index]
            parameter.grad = torch.full_like(parameter, (rank + 1.0) * (index + 1)) if there else None
            if there and parameter.is_complex():
                parameter.grad = (parameter.grad * (1 + 2j)).conj()
        numbers = torch.tensor([1.0, rank, 0.0], dtype=torch.float64)
        found = reducer.reduce(numbers, counts[rank]).sum(0)[:-1]
        reducer.divide_(torch.tensor(2.0, dtype=torch.float64))
        grads = [None if p.grad is None else p.grad.clone() for p in parameters]
        results.append((found.tolist(), grads))
    return results


ALL = [[True] * 4] * 3
SOME = [[True, False, True, False], [True, False, False, False], [True, False, False, True]]


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("present", [ALL, SOME])
@pytest.mark.parametrize("counts", [[True] * 3, [True, False, True]])
def test_sums_and_absent_gradients(ranks, size, present, counts):
    for results in ranks.run(reduced, present, counts, size=size):
        for scalars, grads in results:
            assert scalars == [size, sum(range(size))]
            for index, (dtype, gradient) in enumerate(zip(DTYPES, grads, strict=True)):
                terms = [
                    (rank + 1) * (index + 1) for rank in range(size) if present[rank][index] and counts[rank]
                ]
                if not terms:
                    assert gradient is None
                    continue
                value = sum(terms) / 2 * (1 - 2j if dtype.is_complex else 1)
                assert gradient.dtype == dtype
                assert torch.equal(gradient, torch.full_like(gradient, value))


def strided(context):
    """Parameters and gradients in orders of memory that differ from each other, and from that of the vector."""
    rank, size = context.world.rank, context.world.size
    numbers = torch.arange(24.0)
    last = {"memory_format": torch.channels_last}
    parameters = [
        nn.Parameter(torch.zeros(4, 3).t()),
        nn.Parameter(torch.zeros(3, 4)),
        nn.Parameter(torch.zeros(2, 3, 2, 2).to(**last)),
        nn.Parameter(torch.zeros(2, 3, 2, 2)),
        nn.Parameter(torch.zeros(0, 3)),
        nn.Parameter(torch.zeros(2, 3)),
    ]
    values = [
        numbers[:12].view(3, 4),
        numbers[:12].view(4, 3).t(),
        numbers.view(2, 3, 2, 2),
        numbers.view(2, 3, 2, 2).to(**last),
        torch.zeros(0, 3),
        torch.full((1,), 7.0).expand(2, 3),
    ]
    reducer = GradientReducer(parameters, Group(rank, size), scalars=1)
    for parameter, value in zip(parameters, values, strict=True):
        parameter.grad = value * (rank + 1.0) if value.numel() != 6 else value
    reducer.reduce(torch.ones(1))
    sums = [sum(range(1, size + 1)) * value for value in values[:-1]] + [size * values[-1]]
    again = [parameter.grad.clone() for parameter in parameters]
    # What was handed out is added to in place: it is where it belongs already.
    reducer.reduce(torch.ones(1))
    return [
        torch.equal(first, expected) and torch.equal(parameter.grad, size * expected)
        for parameter, first, expected in zip(parameters, again, sums, strict=True)
    ]


def test_gradients_in_any_order_of_memory(ranks):
    assert ranks.run(strided) == [[True] * 6] * 2


def half(context):
    parameters = [nn.Parameter(torch.zeros(2, dtype=torch.float16))]
    parameters[0].grad = torch.ones(2, dtype=torch.float16)
    reducer = GradientReducer(parameters, Group(context.world.rank, context.world.size), scalars=2)
    return float(reducer.reduce(torch.tensor([100000.0, 0.0]), True).sum(0)[0])


def test_scalars_do_not_travel_in_a_dtype_that_cannot_hold_them(ranks):
    assert ranks.run(half, size=2) == [200000.0] * 2


def wide(context, numbers):
    parameters = [nn.Parameter(torch.zeros(3))]
    parameters[0].grad = torch.ones(3)
    rank, size = context.world.rank, context.world.size
    reducer = GradientReducer(parameters, Group(rank, size), scalars=size + 1)
    slots = torch.zeros(size + 1, dtype=torch.float64)
    slots[rank] = numbers[rank]
    return reducer.reduce(slots, True).sum(0, dtype=torch.float64).tolist()[:-1]


def test_float64_scalars_travel_exactly_beside_float32_gradients(ranks):
    numbers = [1 / 3, -1e30 / 7, 123456789.123456789]
    for found in ranks.run(wide, numbers, size=3):
        assert found == numbers
    found = ranks.run(wide, [float("inf"), float("nan")], size=2)[0]
    assert found[0] == float("inf")
    assert found[1] != found[1]


def in_another_dtype(context, own, dtype, number):
    parameter = nn.Parameter(torch.zeros(3, dtype=own))
    parameter.grad_dtype = dtype
    parameter.grad = torch.full((3,), number, dtype=dtype) * (context.world.rank + 1)
    reducer = GradientReducer([parameter], Group(context.world.rank, context.world.size), scalars=1)
    reducer.reduce(torch.zeros(1))
    return parameter.grad


@pytest.mark.skipif(not hasattr(nn.Parameter, "grad_dtype"), reason="this torch has no grad_dtype")
@pytest.mark.parametrize(
    ("own", "dtype", "number"),
    [
        (torch.bfloat16, torch.float32, 1 + 2.0**-12),
        (torch.complex64, torch.complex128, 1 + 2.0**-40 - 2.0**-45 * 1j),
    ],
)
def test_a_gradient_of_another_dtype_than_its_parameter_keeps_it(ranks, own, dtype, number):
    for gradient in ranks.run(in_another_dtype, own, dtype, number, size=2):
        assert gradient.dtype == dtype
        assert torch.equal(gradient, torch.full((3,), 3 * number, dtype=dtype))
