"""Ranks that read different things are told apart before their numbers meet."""

import random
from collections import namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from kway.data.agreement import alone, check
from kway.data.digest import digest_of
from kway.data.loader import Loader
from kway.data.parts import take_apart
from kway.errors import DataError


class FromEntropy:
    """A sampler that draws from the system: no seed reaches it."""

    def __iter__(self):
        return iter(random.SystemRandom().sample(range(64), 64))


class Counted(IterableDataset):
    def __init__(self, first=0, items=13):
        self.first, self.items = first, items

    def __iter__(self):
        return iter(range(self.first, self.first + self.items))


def both(first, second, batch_size=4, epochs=1):
    """Read two ranks in step: what each gives, its comparisons answered with those of the other."""
    asked = {0: [], 1: []}

    def compare(rank):
        def exchange(number):
            asked[rank].append(number)
            return [number, number]

        return exchange

    loaders = [
        Loader(
            take_apart(data, batch_size=batch_size, seed=0, shuffle=True),
            rank=rank,
            size=2,
            seed=0,
            compare=compare(rank),
        )
        for rank, data in enumerate((first, second))
    ]
    for reader in loaders:
        for epoch in range(epochs):
            assert list(reader.epoch(epoch))
    return asked


def with_sampler(sampler):
    return DataLoader(torch.arange(64), batch_size=16, sampler=sampler)


def test_a_sampler_is_compared_once_an_epoch():
    asked = both(with_sampler(range(32)), with_sampler(range(32)), batch_size=None, epochs=3)
    assert asked[0] == asked[1]
    assert len(asked[0]) == 3
    other = both(with_sampler(FromEntropy()), with_sampler(FromEntropy()), batch_size=None)
    assert other[0] != other[1]


def test_indices_of_any_kind_stand_for_the_same_order():
    kinds = [list(range(8)), list(np.arange(8)), list(torch.arange(8)), range(8)]
    digests = {
        take_apart(with_sampler(k), batch_size=None, seed=0, shuffle=True).order.digest(0) for k in kinds
    }
    assert len(digests) == 1
    odd = take_apart(with_sampler([[1], [1, 2]]), batch_size=None, seed=0, shuffle=True).order
    assert odd.digest(0) not in digests  # it is refused where a batch is asked for, not here


def test_every_index_of_a_long_order_enters():
    long = list(range(1000))
    other = [*long[:500], 0, *long[501:]]
    orders = [
        take_apart(DataLoader(long, batch_size=9, sampler=s), batch_size=None, seed=0, shuffle=True).order
        for s in (long, other)
    ]
    assert orders[0].digest(0) != orders[1].digest(0)


def test_batches_of_a_batch_sampler_are_compared_with_where_they_end():
    def of(batches):
        return DataLoader(torch.arange(64), batch_sampler=batches)

    asked = both(of([[0, 1], [2]]), of([[0], [1, 2]]), batch_size=None)
    assert asked[0] != asked[1]


def test_a_stream_is_compared_batch_by_batch_and_at_its_end():
    same = both(Counted(), Counted())
    assert same[0] == same[1]
    assert len(same[0]) == 5
    assert same[0][-1] == 0
    shorter = both(Counted(), Counted(items=12))
    assert shorter[0][:3] == shorter[1][:3]
    assert shorter[0][3] != shorter[1][3] == 0


def test_an_order_by_arithmetic_and_a_rank_alone_need_no_comparison():
    assert both(torch.arange(8), torch.arange(8)) == {0: [], 1: []}
    parts = take_apart(Counted(), batch_size=4, seed=0, shuffle=True)
    assert len(list(Loader(parts, rank=0, size=1, seed=0).epoch(0))) == 4


def test_the_first_rank_that_differs_is_named():
    check(alone, 5, "{rank}", "", "")
    check(lambda number: [7, 7, 7], 7, "{rank}", "", "")
    with pytest.raises(DataError, match="rank 2 strays: need; do"):
        check(lambda number: [7, 7, 8, 9], 8, "{rank} strays", "need", "do")


def in_rank(context, data, more):
    from kway.comm.group import Group

    group = Group(context.world.rank, context.world.size)
    parts = take_apart(data(context.world.rank), batch_size=more, seed=0, shuffle=True)

    def compare(number):
        return group.stack(torch.tensor(number)).tolist()

    reader = Loader(parts, rank=group.rank, size=group.size, seed=0, compare=compare)
    try:
        return [share.total for epoch in range(2) for share in reader.epoch(epoch)]
    except DataError as error:
        return str(error)


def test_a_sampler_that_draws_from_the_system_is_an_error_on_all_ranks(ranks):
    found = ranks.run(in_rank, lambda rank: with_sampler(FromEntropy()), None, size=3)
    assert found[0] == found[1] == found[2]
    assert found[0].startswith("in epoch 1, FromEntropy gives rank 1 another order than rank 0: ")


@pytest.mark.parametrize(
    ("data", "step"),
    [
        (lambda rank: Counted(first=rank), 1),
        (lambda rank: Counted(items=13 - rank), 4),  # another last batch
        (lambda rank: Counted(items=16 - 4 * rank), 4),  # a batch less
    ],
)
def test_a_stream_that_ranks_see_differently_is_an_error_on_all_ranks(ranks, data, step):
    found = ranks.run(in_rank, data, 4)
    assert found[0] == found[1]
    assert found[0].startswith(f"in epoch 1, step {step}, Counted gives rank 1 other items than rank 0: ")


def test_ranks_that_agree_read_on(ranks):
    assert ranks.run(in_rank, lambda rank: Counted(), 4, size=3) == [[4, 4, 4, 1] * 2] * 3


@dataclass
class Held:
    x: object


class Shown:
    """Like a picture: shows itself as an array."""

    def __init__(self, value):
        self.value = np.full((2, 2), value)

    @property
    def __array_interface__(self):
        return self.value.__array_interface__


Pair = namedtuple("Pair", "x y")
T = torch.arange(6.0)
ALL_DIFFERENT = [
    None, True, 1, 1.0, 1j, "1", b"1", [], [1], [1, 2], [[1], 2], (1, 2), {"a": 1}, {"b": 1}, {"a": 2},
    T, T.view(2, 3), T.int(), T + 1, T.to(torch.bfloat16), T[:0], torch.tensor(1.0), T * 1j, T.to_sparse(),
    torch.zeros(1000), torch.zeros(1000).index_fill(0, torch.tensor([15]), 1),
    np.arange(6.0), np.arange(6), np.float32(1), np.array(["a"]), np.array([None, "a"], dtype=object),
    Held(1), Held(2), Pair(1, 2), Shown(1), Shown(2), float("nan"), "\ud800",
]  # fmt: skip


def test_digests_tell_values_apart_and_repeat():
    digests = [digest_of(value) for value in ALL_DIFFERENT]
    assert len(set(digests)) == len(ALL_DIFFERENT)
    assert digests == [digest_of(value) for value in ALL_DIFFERENT]
    assert all(0 < number < 2**63 for number in digests)


def test_digests_do_not_depend_on_where_values_lie():
    strided = torch.stack([T, T], 1)[:, 0]
    assert digest_of(strided) == digest_of(T)
    assert digest_of(np.arange(12.0)[::2]) == digest_of(np.arange(12.0)[::2].copy())
    assert digest_of(torch.conj(T * 1j)) == digest_of(torch.conj(T * 1j).resolve_conj())
    assert digest_of(object()) == digest_of(object())
