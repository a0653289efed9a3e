import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.measured import measurements, slowdown

from kway.cost.overlap import complete_at, cut, exposed_s, slowdown_of


def layer(size, backward_s):
    return {"parameter_bytes": size, "backward": {"fixed_s": backward_s, "per_sample_s": 0.0}}


# First to last; backward begins with the last one.
LAYERS = [layer(40, 5.0), layer(30, 3.0), layer(30, 2.0)]


def test_buckets_are_cut_from_the_last_layer_on():
    assert cut(100, 30, LAYERS) == [30, 30, 40]
    assert cut(100, 50, LAYERS) == [60, 40]
    assert cut(100, 100, LAYERS) == cut(100, 1_000, LAYERS) == [100]
    assert cut(200, 50, LAYERS) == [60, 60, 80]  # gradients twice as wide as parameters
    assert cut(100, 1, []) == [100]


def test_a_bucket_is_complete_when_backward_has_left_its_layers():
    assert complete_at([30, 30, 40], LAYERS, 1) == pytest.approx([0.2, 0.5, 1.0])
    assert complete_at([60, 40], LAYERS, 1) == pytest.approx([0.5, 1.0])
    assert complete_at([45, 55], LAYERS, 1) == pytest.approx([0.5, 1.0])
    assert complete_at([100], LAYERS, 1) == [1.0]


def test_without_times_a_layer_counts_by_its_bytes():
    assert complete_at([60, 40], [layer(40, 0), layer(60, 0)], 1) == pytest.approx([0.6, 1.0])


def test_one_bucket_is_seen_whole():
    assert exposed_s([(3.0, 1.0)], 10.0, 2.0) == 3


def test_all_but_the_last_hide_behind_backward():
    # Ready at 2 and 5 of 10 seconds, 2 seconds each: both are over before backward is.
    assert exposed_s([(2.0, 0.2), (2.0, 0.5), (1.0, 1.0)], 10.0) == pytest.approx(1.0)


def test_what_is_longer_than_backward_stays_to_be_seen():
    # Begins at 5, ends at 25; the last one then takes another.
    assert exposed_s([(20.0, 0.5), (1.0, 1.0)], 10.0) == pytest.approx(16.0)


def test_a_bucket_waits_for_the_one_before():
    # The second is ready at 5 and begins at 8, ends at 11.
    assert exposed_s([(6.0, 0.2), (3.0, 0.5), (1.0, 1.0)], 10.0) == pytest.approx(2.0)


def test_backward_is_slower_beside_a_reduction():
    # From 5 on 4 seconds of it take 8: the 8 seconds of the reduction; 1 second is left for after it.
    assert exposed_s([(8.0, 0.5), (0.0, 1.0)], 10.0, 2.0) == pytest.approx(4.0)
    # Slowed as much as it hides, nothing is gained over one after the other.
    assert exposed_s([(4.0, 0.5), (1.0, 1.0)], 10.0, 1e9) == pytest.approx(5.0)


BUCKETS = st.lists(st.tuples(st.floats(0, 10), st.floats(0, 1)), min_size=1, max_size=6).map(
    lambda found: [
        (seconds, ready) for (seconds, _), ready in zip(found, sorted(r for _, r in found), strict=True)
    ]
)


@given(BUCKETS, st.floats(0, 20), st.floats(1, 5))
def test_never_more_than_one_after_the_other_and_never_less_than_the_tail(buckets, backward, factor):
    *early, (last, _) = buckets
    buckets = [*early, (last, 1.0)]
    seen = exposed_s(buckets, backward, factor)
    total = sum(seconds for seconds, _ in buckets)
    assert last - 1e-9 <= seen <= total + 1e-9
    assert seen >= total - backward - 1e-9
    assert exposed_s(buckets, backward, factor + 1) >= seen - 1e-9
    more = [(seconds + 1, ready) for seconds, ready in buckets]
    assert exposed_s(more, backward, factor) >= seen - 1e-9


def test_the_slowdown_is_read_between_the_measured_sizes():
    known = measurements(*slowdown({100: 1.2, 10_000: 1.6, 1_000_000: 0.8}))
    assert [slowdown_of(known, size) for size in (1, 100, 1_000, 10_000, 1e9)] == pytest.approx(
        [1.2, 1.2, math.sqrt(1.2 * 1.6), 1.6, 1.0]
    )
    assert slowdown_of(None, 100) == slowdown_of(measurements(), 100) == 1
