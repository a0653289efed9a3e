import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kway.cost.curve import between, rising

TIMES = st.lists(st.tuples(st.integers(1, 1 << 30), st.floats(1e-6, 1e2)), min_size=1, max_size=12)


def test_what_falls_is_pooled_and_the_rest_stays():
    assert rising([(1, 1.0), (2, 4.0), (3, 1.0), (4, 9.0)]) == [
        (1, 1.0),
        (2, pytest.approx(2.0)),  # the geometric mean of 4 and 1
        (3, pytest.approx(2.0)),
        (4, pytest.approx(9.0)),
    ]


def test_two_times_of_one_size_become_their_mean():
    assert rising([(8, 1.0), (8, 4.0)]) == [(8, pytest.approx(2.0))]


@given(TIMES)
def test_times_never_fall_whatever_was_measured(points):
    made = rising(points)
    assert [size for size, _ in made] == sorted({size for size, _ in points})
    seconds = [value for _, value in made]
    assert all(b >= a * (1 - 1e-12) for a, b in pairwise(seconds))
    assert min(t for _, t in points) * (1 - 1e-9) <= min(seconds)
    assert max(seconds) <= max(t for _, t in points) * (1 + 1e-9)


def test_a_power_law_is_read_exactly_between_its_points():
    points = [(size, size**0.5) for size in (1.0, 100.0, 10_000.0)]
    assert between(points, 10.0, math.log) == pytest.approx(math.sqrt(10))
    assert between(points, 400.0, math.log) == pytest.approx(20)


def test_a_line_is_read_exactly_between_its_points():
    points = [(10.0, 3.0), (20.0, 5.0)]
    assert [between(points, at) for at in (10, 15, 20)] == [3, 4, 5]
