import math
import random

import pytest
from tests.measured import measurements, two_devices

from kway.cost.skew import expected_maximum, side_by_side, waiting_s


def test_the_expected_maximum_is_that_of_tables():
    # Exact: 1 / sqrt(pi), 3 / (2 sqrt(pi)); from David and Nagaraja's tables for more.
    exact = {
        1: 0,
        2: 1 / math.sqrt(math.pi),
        3: 1.5 / math.sqrt(math.pi),
        4: 1.02938,
        10: 1.53875,
        100: 2.50759,
    }
    for ranks, value in exact.items():
        assert expected_maximum(ranks) == pytest.approx(value, abs=1e-5)


def test_the_expected_maximum_is_that_of_draws():
    drawn = random.Random(0)
    mean = sum(max(drawn.gauss(0, 1) for _ in range(8)) for _ in range(20_000)) / 20_000
    # The standard deviation of the largest of 8 is 0.61, of this mean 0.0043.
    assert expected_maximum(8) == pytest.approx(mean, abs=5 * 0.0043)


def test_waiting_grows_with_spread_and_ranks_and_is_nothing_for_one():
    assert waiting_s(2.0, 0.1, 1) == 0
    assert waiting_s(2.0, 0.0, 8) == 0
    assert waiting_s(2.0, 0.1, 2) == pytest.approx(0.2 / math.sqrt(math.pi))
    waits = [waiting_s(1.0, 0.1, ranks) for ranks in (2, 3, 64, 512)]
    assert waits == sorted(waits)


def test_ranks_beside_each_other_take_as_much_longer_as_products_do():
    known = measurements(*two_devices(1.0, 1.2, 64), *two_devices(1.0, 1.3, 128), *two_devices(1.0, 0.9, 256))
    assert side_by_side(known, 2) == pytest.approx(1.2)
    assert side_by_side(measurements(*two_devices(1.0, 0.9)), 2) == 1
    assert side_by_side(known, 1) == side_by_side(None, 4) == side_by_side(measurements(), 4) == 1
