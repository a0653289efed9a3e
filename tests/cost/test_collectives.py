import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.measured import bandwidth, measurements, timed

import kway
from kway.cost.collectives import collective_s, measured_ranks

LINE = {1_000: 2e-3, 100_000: 4e-3, 10_000_000: 40e-3}
KNOWN = measurements(*timed(LINE), bandwidth(1e9), *timed({1_000: 7e-3}, ranks=3))


def all_reduce(size, ranks=2, known=KNOWN):
    return collective_s(known, "gloo", "all-reduce", ranks, size)


def test_measured_sizes_take_what_was_measured():
    assert [all_reduce(size) for size in LINE] == pytest.approx(list(LINE.values()))


def test_between_two_sizes_the_logarithm_goes_straight():
    assert all_reduce(10_000) == pytest.approx(math.sqrt(2e-3 * 4e-3))
    assert all_reduce(1_000_000) == pytest.approx(math.sqrt(4e-3 * 40e-3))


def test_below_the_smallest_size_there_is_latency():
    assert all_reduce(8) == all_reduce(1_000)


def test_beyond_the_largest_size_the_fitted_bandwidth_counts():
    assert all_reduce(11_000_000) == pytest.approx(40e-3 + 1e6 / 1e9)
    assert all_reduce(11_000_000, known=measurements(*timed(LINE))) == pytest.approx(44e-3)


def test_one_rank_and_no_byte_cost_nothing():
    assert all_reduce(1_000, ranks=1, known=None) == 0
    assert all_reduce(0) == 0


@given(st.floats(1, 1e10), st.floats(1, 1e10), st.lists(st.floats(1e-6, 1), min_size=1, max_size=8))
def test_more_bytes_never_cost_less(one, other, seconds):
    known = measurements(*timed({10 ** (place + 2): value for place, value in enumerate(seconds)}))
    less, more = sorted((one, other))
    assert all_reduce(less, known=known) <= all_reduce(more, known=known) * (1 + 1e-9)


@pytest.mark.parametrize("known", [None, KNOWN])
def test_what_was_not_measured_is_an_error_that_says_what_to_measure(known):
    with pytest.raises(
        kway.NotMeasuredError, match=r"all-reduce among 5 ranks through gloo.*--devices cpu:5"
    ):
        all_reduce(1_000, ranks=5, known=known)
    with pytest.raises(LookupError):
        collective_s(known, "nccl", "all-reduce", 2, 1_000)
    assert issubclass(kway.NotMeasuredError, kway.UsageError)


def test_numbers_of_ranks_are_those_that_were_measured():
    assert measured_ranks(KNOWN, "gloo") == [2, 3]
    assert measured_ranks(None, "gloo") == []
