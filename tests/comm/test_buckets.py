"""Buckets of the flat gradients: how they are cut, and that they change nothing but the time."""

from itertools import pairwise
from operator import eq
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from kway.comm import apart
from kway.comm.buckets import WATCHED_STEPS, Bucket, BucketedSum, BucketedTree, cut
from kway.comm.flat import FlatGradients
from kway.comm.group import Group
from kway.comm.reduce import GradientReducer
from kway.comm.rehearsed import Calls, RehearsedGroup
from kway.comm.tree import TreeReducer, fold, halves
from kway.data.order import bounds
from kway.errors import RefusedError

SHARDS = 5


def test_buckets_come_in_the_order_of_backward_and_cover_every_vector():
    pieces = [(0, 32, 40), (1, 0, 6), (0, 40, 60), (1, 6, 10), (0, 60, 61)]
    assert cut(pieces, [4, 8], 0, 64, 16) == [
        Bucket(0, 40, 61, (4, 2)),
        Bucket(1, 0, 10, (3, 1)),
        Bucket(0, 0, 40, (0,)),
    ]


@pytest.mark.parametrize("limit", [1, 40, 10**9])
def test_every_entry_lies_in_one_bucket_and_the_front_of_the_carrier_in_the_last(limit):
    dtypes = [torch.float32, torch.bfloat16, torch.float64, torch.float32, torch.complex64]
    flat = FlatGradients([nn.Parameter(torch.zeros(3, 5, dtype=dtype)) for dtype in dtypes], 3)
    found = cut(
        flat.pieces,
        [vector.element_size() for vector in flat.vectors],
        flat.carrier,
        limit,
        len(flat.vectors[flat.carrier]),
    )
    for number, vector in enumerate(flat.vectors):
        spans = sorted((b.start, b.stop) for b in found if b.vector == number)
        assert spans[0][0] == 0
        assert spans[-1][1] == len(vector)
        assert all(a[1] == b[0] for a, b in pairwise(spans))
    assert sorted(place for b in found for place in b.parameters) == list(range(5))
    assert (found[-1].vector, found[-1].start) == (flat.carrier, 0)


def test_what_lies_apart_travels_in_the_bucket_of_its_place():
    # A vector of 16 entries of 4 bytes, one of 6 of 8 bytes, and three gradients that lie in neither.
    pieces = [(0, 8, 12), (2, 0, 20), (1, 0, 6), (3, 0, 16), (0, 12, 16), (4, 0, 3)]
    assert cut(pieces, [4, 8], 0, 64, 16, [0, 1, 0, 0, 1]) == [
        Bucket(0, 12, 16, (4, 3)),
        Bucket(1, 0, 6, (5, 2)),
        Bucket(0, 0, 0, (1,)),
        Bucket(0, 0, 12, (0,)),
    ]


def left_in_place(context, lost):
    """Return whether each gradient of the third step is still where backward left it, and its value."""
    model, rank, size = Added(), context.world.rank, context.world.size
    with (
        mock.patch.object(apart, "APART_BYTES", 20),
        mock.patch.object(apart, "_count", None if lost else apart._count),
    ):
        reducer = GradientReducer(list(model.parameters()), Group(rank, size), 1, limit=64, large_apart=True)
        for _ in range(3):
            with reducer.sending():
                gradients(model, rank)
            before = [None if p.grad is None else p.grad.data_ptr() for p in model.parameters()]
            reducer.reduce(torch.zeros(1), True)
            reducer.divide_(torch.tensor(float(size)))
        names = [name for name, _ in model.named_parameters()]
        where = [p.grad is not None and p.grad.data_ptr() for p in model.parameters()]
    return dict(zip(names, map(eq, before, where), strict=True))


def test_large_gradients_are_reduced_where_they_lie_but_those_that_share_their_memory(ranks):
    for found in ranks.run(left_in_place, False, size=2):
        # A small one lies in the vector, and one that nobody has is none.
        expected = {"unused": False, "one": False, "other": False, "last.weight": True, "last.bias": False}
        assert found == expected
    for found in ranks.run(left_in_place, True, size=2):
        assert not any(found.values())


@pytest.mark.parametrize("limit", [64, None])
def test_what_is_kept_beside_gradients_is_vectors_and_what_cannot_be_sent_as_it_lies(limit):
    """Copies of all large gradients only in the first steps, and only of several buckets."""
    model = Added()
    with mock.patch.object(apart, "APART_BYTES", 20):
        reducer = GradientReducer(
            [*model.parameters()], RehearsedGroup(Calls(), 0, 2), 1, limit=limit, large_apart=True
        )
    copied = []
    for _ in range(4):
        with reducer.sending():
            gradients(model, 0)
        reducer.reduce(torch.zeros(1), True)
        copied.append(reducer.flat.apart.copied_bytes)
    large = {name: p.nbytes for name, p in model.named_parameters() if p.nbytes >= 20}
    # The unused one is a zero, and two have one memory.
    stays = sum(large[name] for name in ("unused", "one", "other"))
    assert copied == [sum(large.values())] * 2 * (limit is not None) + [stays] * (2 if limit else 4)
    vectors = sum(vector.nbytes for vector in reducer.flat.vectors)
    assert reducer.kept_bytes == (vectors + stays, large["last.weight"] if limit else 0)


def test_this_torch_counts_who_holds_memory():
    assert apart._count is not None


def test_a_model_without_parameters_has_one_bucket():
    assert cut([], [4], 0, 64, 5) == [Bucket(0, 0, 5, ())]


class Twice(nn.Module):
    """Reaches one weight in two reentrant checkpoints: backward accumulates into it twice."""

    def __init__(self):
        super().__init__()
        self.unused = nn.Linear(2, 2)
        self.first, self.shared = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(self.shared, x, use_reentrant=True)
        return x


class Chain(nn.Sequential):
    def __init__(self):
        super().__init__(*(nn.Linear(4, 4) for _ in range(4)))


def gradients(model, shard):
    """Compute the gradients of one shard, whose samples depend on its number alone."""
    model.zero_grad(set_to_none=True)
    values = torch.randn(3, 4, generator=torch.Generator().manual_seed(shard)) * 10.0 ** (shard % 3)
    model(values.requires_grad_()).square().sum().backward()


def reduced(context, kind, limit):
    """Return the root of the tree as vectors, and how many buckets were sent before backward ended."""
    torch.manual_seed(0)
    model, rank, size = kind(), context.world.rank, context.world.size
    held = [bounds(SHARDS, size, place) for place in range(size)]
    tree = TreeReducer(Group(rank, size), SHARDS, held)
    flat = FlatGradients(list(model.parameters()), 2)
    bucketed = BucketedTree(flat, tree, limit)

    def leaf(span):
        if span[1] - span[0] > 1:
            return None
        gradients(model, span[0])
        flat.collect(torch.tensor([float(span[0]), 0.0]))
        return [vector.clone() for vector in flat.vectors]

    def add(left, right):
        return [a + b for a, b in zip(left, right, strict=True)]

    *others, last = tree.own
    partials = {span: fold(span, leaf, add) for span in others}
    spine, (start, stop) = [], last
    while stop - start > 1:
        left, (start, stop) = halves((start, stop))
        spine.append(fold(left, leaf, add))
    with bucketed.during_backward(partials, spine):
        gradients(model, start)
        early = len(bucketed._pending)
    bucketed.finish(torch.tensor([float(start), 0.0]), True)
    return flat.vectors, early, len(bucketed.buckets)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", [Chain, Twice])
def test_buckets_have_the_bits_of_the_whole(ranks, kind, size):
    (expected, _, one), *_ = ranks.run(reduced, kind, 10**9, size=1)
    assert one == 1
    for found, early, count in ranks.run(reduced, kind, 64, size=size):
        assert count > 2 if size > 1 else count == 1
        assert (early > 0) == (size > 1)
        for a, b in zip(found, expected, strict=True):
            assert torch.equal(a, b)
    assert expected[0][len(list(kind().parameters()))] == sum(range(SHARDS))


class Sometimes(Twice):
    """Reaches its weight a second time while ``late``."""

    late = False

    def forward(self, x):
        return super().forward(x) if self.late else self.shared(self.first(x))


def steps(context, switch, count):
    """Reduce ``count`` steps, the last rank late from step ``switch`` on; what each left, or the error."""
    torch.manual_seed(0)
    model, rank, size = Sometimes(), context.world.rank, context.world.size
    tree = TreeReducer(Group(rank, size), size, [(place, place + 1) for place in range(size)])
    flat = FlatGradients(list(model.parameters()), 1)
    bucketed = BucketedTree(flat, tree, 64)
    found = []
    for step in range(count):
        model.late = step >= switch and rank == size - 1
        try:
            with bucketed.during_backward({}, []):
                gradients(model, rank)
            bucketed.finish(torch.zeros(1), True)
        except RefusedError as error:
            found.append(str(error))
        else:
            found.append((bool(flat.scalars[-1].isnan()), flat.vectors[0].clone()))
    return found


def test_a_gradient_that_changes_after_it_was_sent_is_sent_again_in_the_first_steps(ranks):
    for found in ranks.run(steps, 1, 4, size=2):
        assert [late for late, _ in found] == [False] * 4
        for _, vector in found[2:]:
            assert torch.equal(vector, found[1][1])
        assert not torch.equal(found[0][1], found[1][1])


def test_later_it_is_an_error_there_and_not_a_number_elsewhere(ranks):
    other, late = ranks.run(steps, WATCHED_STEPS, WATCHED_STEPS + 1, size=2)
    assert [step[0] for step in other] == [False] * WATCHED_STEPS + [True]
    assert "changed after it was sent" in late[-1]
    assert "use_reentrant=False" in late[-1]


class FailedError(Exception):
    """Of a back end."""


def after_a_failure(context, limit):
    """Let the reductions of one step fail from the second on, and of the next once it was sent; return what the step
    after each gives, which sends nothing ahead, and what it should give.
    """
    torch.manual_seed(0)
    model, rank, size = Chain(), context.world.rank, context.world.size
    group = Group(rank, size)
    tree = TreeReducer(group, size, [(place, place + 1) for place in range(size)])
    flats = [FlatGradients(list(model.parameters()), 1) for _ in range(2)]
    found = []
    for bucketed in (BucketedTree(flats[0], tree, limit), BucketedSum(flats[1], group, limit)):
        bucketed._early, begin = False, bucketed.begin
        for fails in ("begin", "complete"):

            def failing(bucket, vector, begin=begin, own=bucketed, fails=fails):
                if fails == "begin" and own._pending:
                    raise FailedError
                complete = begin(bucket, vector)
                return complete if fails == "begin" else _raising(complete)

            bucketed.begin = failing
            with pytest.raises(FailedError):
                step(bucketed, model, rank, True)
            bucketed.begin = begin
            step(bucketed, model, size + rank, False)
            after = [vector.clone() for vector in bucketed.flat.vectors]
            step(bucketed, model, size + rank, True)
            found += [
                (torch.equal(a, b), len(bucketed._sent))
                for a, b in zip(after, bucketed.flat.vectors, strict=True)
            ]
    return found


def _raising(complete):
    def completing():
        complete()
        raise FailedError

    return completing


def step(bucketed, model, shard, ahead):
    """Reduce one shard's gradients, with ``sending`` or as a rank does that has none to send ahead."""
    gradients(model, shard)
    if ahead:
        with bucketed.sending():
            pass
    bucketed.finish(torch.zeros(1), True)


def test_a_reduction_that_fails_leaves_nothing_to_the_next_one(ranks):
    for found in ranks.run(after_a_failure, 64, size=2):
        assert len(found) == 4
        assert found == [(True, 0)] * 4


def summed(context, kind, limit, empty=-1, large_apart=False):
    """Sum three steps' gradients; return the last gradients, the numbers, and how many buckets were sent ahead."""
    torch.manual_seed(0)
    model, rank, size = kind(), context.world.rank, context.world.size
    with mock.patch.object(apart, "APART_BYTES", 20):
        reducer = GradientReducer(
            list(model.parameters()), Group(rank, size), scalars=2, limit=limit, large_apart=large_apart
        )
    for step in range(3):
        counts = rank != empty
        if counts:
            with reducer.sending():
                gradients(model, size * step + rank)
                early = len(reducer.buckets._pending)
        else:
            gradients(model, size * step + rank)
            early = 0
        number, late = reducer.reduce(torch.tensor([1.0 + rank, 0.0]), counts).sum(0)
    return (
        [p.grad.clone() for p in model.parameters() if p.grad is not None],
        number.item(),
        late.item(),
        early,
    )


class Added(nn.Module):
    """Two tables whose gradients are views of one tensor, a convolution whose weight lies otherwise, one unused."""

    def __init__(self):
        super().__init__()
        self.unused = nn.Parameter(torch.randn(3, 8))
        self.one, self.other = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4, 4))
        self.last = nn.Conv2d(2, 2, 2).to(memory_format=torch.channels_last)

    def forward(self, x):
        x = x @ (self.one.unsqueeze(0) + self.other.unsqueeze(0))
        return self.last(x.view(1, 3, 2, 2)[:, :2].contiguous(memory_format=torch.channels_last))


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize(
    ("kind", "large_apart"), [(Chain, False), (Twice, False), (Chain, True), (Twice, True), (Added, True)]
)
def test_a_sum_in_buckets_is_the_sum(ranks, kind, large_apart, size):
    for empty in (-1, 1):
        found = ranks.run(summed, kind, 64, empty, large_apart, size=size)
        whole = ranks.run(summed, kind, None, empty, size=size)
        for rank, (grads, numbers, late, early) in enumerate(found):
            assert (numbers, late) == (sum(range(1, size + 1)), 0.0)
            # What reentrant checkpoints reach twice is sent after backward, once that has been seen.
            assert (early > 0) == (size > 1 and kind is not Twice and rank != empty)
            for one, other in zip(grads, whole[rank][0], strict=True):
                torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
