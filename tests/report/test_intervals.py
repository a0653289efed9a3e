"""Sets of points in time, against the same sets as whole numbers."""

import random
from itertools import pairwise

import pytest

from kway.report.intervals import both, length, union, without


def points(spans):
    return {at for begin, end in spans for at in range(begin, end)}


def drawn(seed):
    random.seed(seed)
    pairs = [(random.randrange(40), random.randrange(40)) for _ in range(random.randrange(9))]
    return [(min(pair), max(pair)) for pair in pairs]


def test_by_hand():
    a, b = union([(5, 9), (0, 2), (8, 12), (2, 3), (20, 20)]), union([(1, 6), (11, 30)])
    assert a == [(0, 3), (5, 12)]
    assert both(a, b) == [(1, 3), (5, 6), (11, 12)]
    assert without(a, b) == [(0, 1), (6, 11)]
    assert without(b, a) == [(3, 5), (12, 30)]
    assert length(a) == 10


@pytest.mark.parametrize("seed", range(50))
def test_they_are_the_sets_of_their_points(seed):
    first, second = drawn(seed), drawn(1000 + seed)
    a, b = union(first), union(second)
    assert points(a) == points(first)
    assert all(left[1] < right[0] for left, right in pairwise(a))
    assert union(first, second) == union(a, b)
    assert points(both(a, b)) == points(a) & points(b)
    assert points(without(a, b)) == points(a) - points(b)
    assert length(a) == len(points(a))
