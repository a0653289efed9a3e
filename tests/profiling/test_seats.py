"""Which shares are timed."""

import pytest

from kway.profiling.seats import Seat, numbers, seats


def test_numbers_of_devices_grow_by_halves():
    assert numbers(1) == [1]
    assert numbers(4) == [1, 2, 3, 4]
    assert numbers(64) == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64]


@pytest.mark.parametrize("most", range(1, 70))
def test_the_last_number_is_the_largest_and_none_comes_twice(most):
    found = numbers(most)
    assert found[-1] == most
    assert found == sorted(set(found))


def test_ranks_of_a_cpu_share_its_threads_and_each_number_has_a_line_of_its_own():
    assert seats(256, 2, lambda count: 2 // count) == [Seat(1, 2, (256, 128, 64)), Seat(2, 1, (128, 64))]


def test_where_threads_are_alike_shares_are_each_others_points():
    found = seats(256, 4, lambda count: 8)
    assert [seat.shares for seat in found] == [(256, 128, 64), (128,), (86,), (64, 32)]


def test_a_share_has_at_least_one_sample_and_no_device_is_without():
    assert seats(1, 8, lambda count: 1) == [Seat(1, 1, (1,))]
    assert seats(3, 8, lambda count: 1)[-1] == Seat(3, 1, (1,))
