"""Fits on lines that are known."""

import pytest

from kway.measuring.fit import crossing, hinge, line

SIZES = [2.0**k for k in range(0, 24, 2)]


def test_a_line_is_found_with_no_error():
    found = line(SIZES, [5e-6 + 1e-9 * size for size in SIZES])
    assert found.latency_s == pytest.approx(5e-6)
    assert found.bandwidth == pytest.approx(1e9)
    assert found.latency_error_s < 1e-12
    assert found.bandwidth_spread < 1e-6


def test_the_errors_hold_what_the_noise_has_moved():
    noise = [1 + 0.05 * (-1) ** place for place in range(len(SIZES))]
    found = line(SIZES, [(5e-6 + 1e-9 * size) * each for size, each in zip(SIZES, noise, strict=True)])
    assert abs(found.latency_s - 5e-6) < 3 * found.latency_error_s
    assert abs(found.per_unit_s - 1e-9) < 3 * found.per_unit_error_s
    assert 0.001 < found.bandwidth_spread < 0.1


def test_the_errors_are_those_of_ordinary_regression_where_weights_are_equal():
    # Times that hardly differ weigh alike: then textbook figures hold (x 1..4, t 10, 10.1, 9.9, 10.2).
    found = line([1, 2, 3, 4], [10.0, 10.1, 9.9, 10.2])
    assert found.per_unit_s == pytest.approx(0.04, abs=2e-3)
    assert found.latency_s == pytest.approx(9.95, abs=2e-2)
    assert found.per_unit_error_s == pytest.approx(0.0640, rel=0.03)
    assert found.latency_error_s == pytest.approx(0.1752, rel=0.03)


def test_two_points_are_no_fit():
    assert line([1, 2], [1.0, 2.0]) is None
    assert line([1, 1, 1], [1.0, 2.0, 3.0]) is None


def test_curves_cross_where_their_logarithms_do():
    sizes = [1.0, 10.0, 100.0, 1000.0]
    cpu = [size * 1e-6 for size in sizes]
    gpu = [3e-5] * 4
    assert crossing(sizes, cpu, gpu) == pytest.approx(30.0)


def test_only_the_last_crossing_counts():
    assert crossing([1, 2, 4], [2.0, 1.0, 4.0], [1.0, 2.0, 2.0]) == pytest.approx(2 * 2**0.5)


def test_no_crossing():
    assert crossing([1, 2], [1.0, 1.0], [2.0, 2.0]) is None
    assert crossing([1, 2], [3.0, 3.0], [2.0, 2.0]) == 1
    assert crossing([], [], []) is None


def test_of_what_is_queued_the_longer_of_launch_and_bytes_counts():
    sizes = [2.0**k for k in (10, 14, 18, 22, 26)]
    fit = hinge(sizes, [max(7e-6, size / 50e9) for size in sizes])
    assert (fit.latency_s, fit.bandwidth) == (pytest.approx(7e-6), pytest.approx(50e9))
    assert fit.bandwidth_spread < 1e-6
    # As read on an H200: pinned, non-blocking. A straight line gives 63 GB/s, which is all that the slot carries.
    seconds = [7.45e-6, 7.43e-6, 7.41e-6, 79.85e-6, 1235e-6]
    fit = hinge(sizes, seconds)
    assert fit.latency_s == pytest.approx(7.43e-6, rel=0.005)
    assert 2**22 / seconds[3] < fit.bandwidth < 2**26 / seconds[4]
    assert fit.bandwidth_spread < 0.03
    assert line(sizes, seconds).bandwidth_spread > 0.2
    assert hinge(sizes[:2], seconds[:2]) is None


def test_a_hinge_of_one_slope_is_one_point_of_latency():
    sizes = [1.0, 10.0, 100.0]
    assert hinge(sizes, [size / 2 for size in sizes]).bandwidth == pytest.approx(2.0)
