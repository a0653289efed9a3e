"""Sparse gradients of ranks: what is added, what stays sparse, and what a rank without rows does to the others."""

import pytest
import torch
from torch import nn

from kway.comm.flat import FlatGradients
from kway.comm.group import Group
from kway.comm.reduce import GradientReducer

SHAPE = (5, 2)


def sparse(entries, dtype=torch.float64):
    """A gradient that is not coalesced: (row, value) pairs, the value in both columns."""
    rows = torch.tensor([[row for row, _ in entries]], dtype=torch.int64)
    values = torch.tensor([[value, 2 * value] for _, value in entries], dtype=dtype).reshape(-1, 2)
    return torch.sparse_coo_tensor(rows, values, SHAPE, check_invariants=False)


ROWS = [
    [(3, 1.0), (0, 2.0), (3, 4.0)],
    [],
    [(4, 1.0), (3, 0.5), (0, -2.0)],
]


def reduced(context, grads, counts, dtype):
    """Reduce a table beside a dense parameter, twice; return the table's gradient, sparse or dense."""
    rank, size = context.world.rank, context.world.size
    table, other = nn.Parameter(torch.zeros(SHAPE, dtype=dtype)), nn.Parameter(torch.zeros(2))
    reducer = GradientReducer([table, other], Group(rank, size), scalars=2, tables=[table])
    for _ in range(2):
        table.grad = None if grads[rank] is None else grads[rank].clone()
        other.grad = torch.ones(2)
        found = float(reducer.reduce(torch.tensor([rank + 1.0, 0.0]), counts[rank]).sum(0)[0])
        reducer.divide_(torch.tensor(2.0, dtype=torch.float64))
    return table.grad, other.grad.clone(), found


def whole(grads, counts):
    there = [
        grad.to_dense() for grad, counted in zip(grads, counts, strict=True) if counted and grad is not None
    ]
    return sum(there) / 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_sums_are_sparse_coalesced_and_hold_the_rows_of_all(ranks, size, dtype):
    factor = 1 + 2j if dtype.is_complex else 1
    grads = [sparse([(row, value * factor) for row, value in entries], dtype) for entries in ROWS][:size]
    found = ranks.run(reduced, grads, [True] * 3, dtype, size=size)
    for grad, other, scalar in found:
        assert grad.is_sparse
        assert grad.is_coalesced()
        assert grad.indices()[0].tolist() == ([0, 3] if size < 3 else [0, 3, 4])
        assert torch.equal(grad.to_dense(), whole(grads, [True] * size))
        assert torch.equal(grad.values(), found[0][0].values())
        assert other.tolist() == [size / 2] * 2
        assert scalar == sum(range(1, size + 1))


def test_a_row_that_adds_up_to_zero_is_still_a_row(ranks):
    grads = [sparse([(1, 1.0)]), sparse([(1, -1.0)])]
    for grad, *_ in ranks.run(reduced, grads, [True] * 2, torch.float64, size=2):
        assert grad.indices()[0].tolist() == [1]
        assert not grad.values().any()


def test_no_rank_with_rows_leaves_an_empty_sparse_gradient(ranks):
    for grad, *_ in ranks.run(reduced, [sparse([])] * 2, [True] * 2, torch.float64, size=2):
        assert grad.is_sparse
        assert grad.values().shape == (0, 2)


@pytest.mark.parametrize("missing", [0, 1, 2])
@pytest.mark.parametrize("ghost", [False, True])
def test_a_rank_without_a_gradient_or_a_sample_adds_nothing(ranks, missing, ghost):
    grads, counts = [sparse(entries) for entries in ROWS], [True] * 3
    if ghost:
        counts[missing] = False
    else:
        grads[missing] = None
    for grad, *_ in ranks.run(reduced, grads, counts, torch.float64, size=3):
        assert grad.is_sparse
        assert torch.equal(grad.to_dense(), whole(grads, counts))


def test_nobody_s_gradient_stays_none(ranks):
    for grad, *_ in ranks.run(reduced, [None, sparse([(1, 1.0)])], [True, False], torch.float64, size=2):
        assert grad is None


@pytest.mark.parametrize("place", [0, 1, 2])
def test_one_dense_gradient_makes_the_sum_dense(ranks, place):
    grads = [sparse(entries) for entries in ROWS]
    grads[place] = torch.arange(10.0, dtype=torch.float64).view(SHAPE)
    for grad, *_ in ranks.run(reduced, grads, [True] * 3, torch.float64, size=3):
        assert not grad.is_sparse
        assert torch.equal(grad, whole(grads, [True] * 3))


def test_what_is_sparse_in_every_dimension_becomes_dense(ranks):
    picked = torch.eye(5, 2, dtype=torch.float64).to_sparse()
    for grad, *_ in ranks.run(reduced, [picked, sparse([(3, 1.0)])], [True] * 2, torch.float64, size=2):
        assert not grad.is_sparse
        assert torch.equal(grad, (picked.to_dense() + sparse([(3, 1.0)]).to_dense()) / 2)


def test_a_sparse_gradient_that_nobody_announced_is_summed_dense(ranks):
    def unannounced(context):
        table = nn.Parameter(torch.zeros(SHAPE, dtype=torch.float64))
        reducer = GradientReducer([table], Group(context.world.rank, context.world.size), scalars=1)
        table.grad = sparse(ROWS[0])
        reducer.reduce(torch.ones(1), True)
        return table.grad.clone()

    for grad in ranks.run(unannounced, size=2):
        assert torch.equal(grad, 2 * sparse(ROWS[0]).to_dense())


def test_scalars_keep_the_precision_of_a_model_of_tables_alone(ranks):
    def alone(context):
        table = nn.Parameter(torch.zeros(SHAPE, dtype=torch.float64))
        group = Group(context.world.rank, context.world.size)
        reducer = GradientReducer([table], group, scalars=2, tables=[table])
        table.grad = sparse(ROWS[0])
        parts = reducer.reduce(torch.tensor([1 / 3, 0.0], dtype=torch.float64), True)
        return float(parts.sum(0)[0])

    assert ranks.run(alone, size=2) == [2 / 3] * 2


@pytest.mark.parametrize(
    ("grads", "rows"),
    [
        ([sparse(ROWS[0]), sparse(ROWS[2])], [0, 3, 4]),
        ([sparse(ROWS[0]), None], [0, 3]),
        ([sparse([(1, 1.0)]), sparse([(1, -1.0)])], [1]),
        ([sparse([]), None], []),
        ([None, None], None),
        ([sparse(ROWS[0]), torch.ones(SHAPE, dtype=torch.float64)], "dense"),
    ],
)
def test_flat_vectors_give_back_the_rows_of_all_parts(grads, rows):
    table, other = nn.Parameter(torch.zeros(SHAPE, dtype=torch.float64)), nn.Parameter(torch.zeros(3))
    flat = FlatGradients([other, table], 2, tables=[table])
    total = [torch.zeros_like(vector) for vector in flat.vectors]
    for grad in grads:
        table.grad, other.grad = grad, torch.ones(3)
        flat.collect(torch.ones(2))
        torch._foreach_add_(total, flat.vectors)
    torch._foreach_copy_(flat.vectors, total)
    flat.hand_out()
    assert flat.scalars.tolist() == [2.0, 2.0]
    flat.divide_(torch.tensor(4.0))
    assert other.grad.tolist() == [0.5] * 3
    if rows is None:
        assert table.grad is None
        return
    assert table.grad.is_sparse == (rows != "dense")
    there = [grad.to_dense() for grad in grads if grad is not None]
    assert torch.equal(table.grad.to_dense(), sum(there) / 4)
    if rows != "dense":
        assert table.grad.is_coalesced()
        assert table.grad.indices()[0].tolist() == rows
