import math
import random
from itertools import combinations

import pytest

from kway.cost.skew import waiting_s
from kway.profiling.scatter import mean_difference, scatter


def test_the_mean_difference_is_that_of_all_pairs():
    drawn = random.Random(0)
    for count in (2, 3, 10):
        values = [drawn.random() for _ in range(count)]
        pairs = [abs(a - b) for a, b in combinations(values, 2)]
        assert mean_difference(values) == pytest.approx(sum(pairs) / len(pairs))


def test_it_is_the_standard_deviation_of_normal_draws_within_windows():
    drawn = random.Random(0)
    # The windows differ by far more than the steps within one do.
    windows = [[mean * drawn.gauss(1, 0.05) for _ in range(200)] for mean in (1.0, 3.0, 9.0)]
    # Of the mean of 200 draws' distances the standard error is about 5 %.
    assert scatter(windows) == pytest.approx(0.05, rel=0.15)
    assert scatter([[1.0], []]) is scatter([]) is None
    assert scatter([[2.0, 2.0, 2.0], [1.0]]) == 0


def test_what_two_ranks_wait_is_that_of_their_own_steps_whatever_their_distribution():
    # One step in five takes twice as long: of two ranks one of them waits one unit in 2 x 0.2 x 0.8 of all steps.
    steps = [1.0] * 800 + [2.0] * 200
    mean = 1.2
    expected = 0.5 * 2 * 0.2 * 0.8
    deviation = scatter([steps])
    assert waiting_s(mean, deviation, 2) == pytest.approx(expected, rel=1e-2)
    assert math.isclose(deviation, math.sqrt(math.pi) / 2 * mean_difference(steps) / mean)
