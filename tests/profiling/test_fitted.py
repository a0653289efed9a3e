"""Lines through times: what made them is found again, and no part is below zero."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kway.profiling.fitted import line_through

SIZES = (16, 32, 64, 128)


@given(st.floats(0, 1), st.floats(1e-6, 1))
def test_a_line_is_found_again(fixed, each):
    times = [fixed + each * size for size in SIZES]
    found = line_through(SIZES, times)
    assert found[:2] == pytest.approx((fixed, each), rel=1e-6, abs=1e-9)
    assert found[2] < 1e-6


@given(st.lists(st.floats(1e-6, 10), min_size=4, max_size=4))
def test_no_part_is_below_zero_and_no_other_line_at_its_bounds_is_better(times):
    fixed, each, error = line_through(SIZES, times)
    assert fixed >= 0
    assert each >= 0

    def loss(a, b):
        return sum(((a + b * n - t) / t) ** 2 for n, t in zip(SIZES, times, strict=True))

    best = loss(fixed, each)
    for a, b in ((1.01, 1), (0.99, 1), (1, 1.01), (1, 0.99)):
        assert best <= loss(fixed * a, each * b) + 1e-9
    assert error == pytest.approx(
        max(abs(fixed + each * n - t) / t for n, t in zip(SIZES, times, strict=True))
    )


def test_times_that_fall_with_the_size_are_a_level():
    fixed, each, _ = line_through((1, 2, 4), (3.0, 2.0, 1.0))
    assert each == 0
    assert 1 < fixed < 3


def test_one_size_tells_of_no_fixed_part_and_no_time_of_nothing():
    assert line_through((4, 4), (2.0, 2.0)) == (0.0, 0.5, 0.0)
    assert line_through((1, 2), (0.0, 0.0)) == (0.0, 0.0, 0.0)
