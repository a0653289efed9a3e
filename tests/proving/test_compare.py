"""When two tensors count as the same."""

import math

import pytest
import torch

from kway.proving.compare import Comparison, tolerance, ulps
from kway.proving.reference import Snapshot

EPS = torch.finfo(torch.float64).eps
ONES = torch.ones(3, dtype=torch.float64)


def compared(own, got, noise=0.0, step=1):
    comparison = Comparison()
    before = {}
    comparison.add(step, Snapshot(before, own, dict.fromkeys(own, noise)), got)
    return comparison


def one(own, got, noise=0.0):
    return compared({"model/w": own}, {"model/w": got}, noise)


def test_equal_tensors_are_equal_in_bits():
    comparison = one(ONES, ONES.clone())
    assert (comparison.equal, comparison.tensors, comparison.max_ulps, comparison.max_abs_diff) == (
        "bits",
        1,
        0,
        0,
    )


@pytest.mark.parametrize(("ulp", "equal"), [(1, "ulps"), (64, "ulps"), (65, "no"), (1000, "no")])
def test_64_eps_of_the_largest_magnitude_pass_without_noise(ulp, equal):
    got = ONES.clone()
    got[1] += ulp * EPS
    comparison = one(ONES, got)
    assert comparison.equal == equal
    assert comparison.max_ulps == ulp
    assert comparison.max_abs_diff == ulp * EPS
    # The same difference beside a value of 2 ** 20 is far below its rounding.
    large = torch.cat([ONES, torch.tensor([2.0**20], dtype=torch.float64)])
    assert one(large, torch.cat([got, large[3:]])).equal == "ulps"


@pytest.mark.parametrize(("factor", "equal"), [(15.9, "ulps"), (16.1, "no")])
def test_16_times_the_reference_s_own_noise_pass(factor, equal):
    noise = 1e-6
    got = ONES.clone()
    got[0] += factor * noise
    assert one(ONES, got, noise).equal == equal


def test_what_passes_by_the_noise_of_the_reference_alone_is_named():
    got = ONES.clone()
    got[0] += 64 * EPS
    assert one(ONES, got, noise=EPS).by_noise == set()
    got[0] += 1e-12
    comparison = one(ONES, got, noise=1e-12)
    assert (comparison.equal, comparison.by_noise) == ("ulps", {"model/w"})
    assert one(ONES, got).by_noise == set()  # it fails


def test_noise_does_not_shrink_what_is_allowed():
    got = ONES.clone()
    got[0] += 60 * EPS
    assert one(ONES, got, noise=EPS).equal == "ulps"


def test_a_tensor_of_noise_alone_stays_out_of_the_ulps():
    own, got = ONES * 1e-18, ONES * -1e-18
    comparison = one(own, got, noise=2e-18)
    assert (comparison.equal, comparison.max_ulps, comparison.noise_only) == ("ulps", 0, {"model/w"})
    assert one(own, got * 100, noise=2e-18).equal == "no"


def test_integers_and_booleans_must_be_equal():
    assert one(torch.tensor([3]), torch.tensor([3])).equal == "bits"
    comparison = one(torch.tensor([3]), torch.tensor([4]), noise=100.0)
    assert comparison.equal == "no"
    assert comparison.first_difference == {"step": 1, "tensor": "model/w"}
    assert one(torch.tensor([True]), torch.tensor([False]), noise=5.0).equal == "no"


def test_numbers_that_are_none_must_be_in_the_same_places():
    nan, inf = torch.tensor([math.nan, 1.0]), torch.tensor([math.inf, 1.0])
    assert one(nan, nan.clone()).passed
    assert one(inf, inf.clone()).equal == "bits"
    for own, got in ((nan, inf), (inf, nan), (inf, -inf), (torch.ones(2), nan), (torch.ones(2), inf)):
        assert one(own, got).equal == "no", (own, got)
        assert one(got, own).equal == "no", (got, own)


def test_a_tensor_that_only_one_of_both_has_is_a_difference():
    comparison = compared({"loss": ONES, "gradient/a": ONES}, {"loss": ONES})
    assert comparison.equal == "no"
    assert comparison.first_difference == {"step": 1, "tensor": "gradient/a"}
    comparison = compared({"loss": ONES}, {"loss": ONES, "gradient/a": ONES})
    assert comparison.equal == "no"
    assert "gradient/a" in comparison.reason


@pytest.mark.parametrize(
    "got", [torch.ones(3), torch.ones(1, 3, dtype=torch.float64), torch.ones(2).double()]
)
def test_shape_and_dtype_must_be_the_same(got):
    comparison = one(ONES, got)
    assert comparison.equal == "no"
    assert str(tuple(got.shape)) in comparison.reason


def test_the_first_difference_is_kept():
    comparison = Comparison()
    for step, shift in ((1, 0.0), (2, 0.5), (3, 2.0)):
        own = {"loss": ONES, "model/w": ONES}
        got = {"loss": ONES, "model/w": ONES + shift}
        comparison.add(step, Snapshot({}, own, dict.fromkeys(own, 0.0)), got)
    assert comparison.first_difference == {"step": 2, "tensor": "model/w"}
    assert "step 2" in comparison.reason
    assert comparison.max_abs_diff == 2.0
    assert comparison.tensors == 6


def test_complex_tensors_compare_by_their_distance():
    own = torch.tensor([3 + 4j], dtype=torch.complex128)
    assert one(own, own + 1e-15j).equal == "ulps"
    assert one(own, own + 1e-10j).equal == "no"


def test_ulps_are_units_in_the_last_place():
    assert ulps(torch.float64, 1.0, EPS) == 1
    assert ulps(torch.float64, 1.999, EPS) == 1
    assert ulps(torch.float64, 2.0, EPS) == 0.5
    assert ulps(torch.float32, 1.0, 2.0**-23) == 1
    assert ulps(torch.float32, 0.0, 1e-30) > 0
    assert ulps(torch.float64, 1.0, math.nan) == math.inf
    assert ulps(torch.float64, math.inf, 1.0) == math.inf


def test_the_tolerance_is_the_larger_of_both():
    assert tolerance(ONES, 2.0, 0.0) == 128 * EPS
    assert tolerance(ONES, 2.0, 1.0) == 16.0
    assert tolerance(torch.tensor([1]), 2.0, 1.0) == 0.0
