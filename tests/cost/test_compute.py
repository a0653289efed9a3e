import pytest
from tests.workloads import FIXED_S, PER_SAMPLE_S, workload

import kway
from kway.cost.compute import BACKWARD, RECORDS, backward_s, compute_s, fixed_s, is_timed, spread_of
from kway.step.kinds import KINDS


def line(samples):
    return FIXED_S + PER_SAMPLE_S * samples


@pytest.mark.parametrize("samples", [1, 16, 32, 40, 128, 1_000])
def test_what_is_a_line_is_read_as_one_within_and_beyond_the_measured_shares(samples):
    assert compute_s(workload(), "eager", samples) == pytest.approx(line(samples))
    assert compute_s(workload(), "eager", samples, part="forward") == pytest.approx(0.3 * line(samples))


def test_between_measured_shares_the_measured_counts_not_the_fit():
    known = workload()
    for timing in known.timings:
        if timing["samples"] == 64:
            timing["seconds"] *= 3
    assert compute_s(known, "eager", 64) == pytest.approx(3 * line(64))
    assert compute_s(known, "eager", 48) == pytest.approx((line(32) + 3 * line(64)) / 2)


def test_without_a_fit_the_nearest_two_shares_make_the_line():
    assert compute_s(workload(fits=[]), "eager", 200) == pytest.approx(line(200))
    with pytest.raises(kway.NotMeasuredError, match="only a share of 32 was timed"):
        compute_s(workload((32,), fits=[]), "eager", 16)
    # A record may hold a line through its one share.
    with pytest.raises(kway.NotMeasuredError, match="only a share of 32 was timed"):
        compute_s(workload((32,)), "eager", 64)


def test_the_timings_of_a_rank_of_several_count_for_one():
    both = workload(timings=[*workload().timings, *workload(devices=2, fixed_s=5e-3).timings])
    assert compute_s(both, "eager", 64) == pytest.approx(line(64))
    assert compute_s(both, "eager", 64, several=True) == pytest.approx(line(64) + 4e-3)


def test_one_of_several_that_was_not_timed_counts_as_one_alone():
    assert compute_s(workload(), "eager", 64, several=True) == compute_s(workload(), "eager", 64)


def test_the_nearest_number_of_threads_counts():
    slow, fast = workload(threads=(1,), per_sample_s=4e-4), workload(threads=(4,))
    both = workload(timings=[*slow.timings, *fast.timings], fits=[*slow.fits, *fast.fits])
    assert compute_s(both, "eager", 64, 1) == compute_s(slow, "eager", 64)
    assert compute_s(both, "eager", 200, 3) == compute_s(fast, "eager", 200)
    assert compute_s(both, "eager", 64, 2) == compute_s(slow, "eager", 64)


def test_a_step_kind_that_was_not_timed_says_why():
    with pytest.raises(kway.NotMeasuredError, match="step kind graph: it needs a CUDA device"):
        compute_s(workload(step_kinds_left={"graph": "it needs a CUDA device"}), "graph", 8)
    with pytest.raises(kway.NotMeasuredError, match="--step-kind compiled"):
        compute_s(workload(), "compiled", 8)


def test_the_fixed_part_is_that_of_the_line():
    assert fixed_s(workload(), "eager") == FIXED_S
    assert fixed_s(workload(fits=[]), "eager") == 0


def test_backward_is_timed_or_by_layers_or_two_thirds():
    assert backward_s(workload(), "eager", 64) == pytest.approx(0.6 * line(64))
    steps = [timing for timing in workload().timings if timing["part"] == "step"]
    fits = [fit for fit in workload().fits if fit["part"] == "step"]
    assert not is_timed(workload(timings=steps, fits=fits), "eager", "backward")
    assert backward_s(workload(timings=steps, fits=fits), "eager", 64) == pytest.approx(line(64) * 2 / 3)
    # What starting costs is not of the layers' part: a kind that is not timed apart is there to start less.
    late = {"fixed_s": 7.0, "per_sample_s": 6e-5}
    slow = [{**workload().layers[0], "backward": late}]
    assert backward_s(workload(timings=steps, fits=fits, layers=slow), "eager", 64) == pytest.approx(
        line(64) * 2 / 3
    )
    bare = workload(timings=steps, fits=fits, layers=[])
    assert backward_s(bare, "eager", 64) == pytest.approx(line(64) * BACKWARD)


def test_backward_of_a_recorded_step_is_the_part_that_it_is_of_the_step_it_records():
    both = workload()
    recorded = [
        {**each, "step_kind": "graph", "seconds": each["seconds"] / 2}
        for each in both.timings
        if each["part"] == "step"
    ]
    known = workload(timings=[*both.timings, *recorded], layers=[])
    # Of what a sample adds to an eager step 60 % are backward's.
    assert backward_s(known, "graph", 64) == pytest.approx(0.6 * line(64) / 2)
    # The step that a compiled recorded one records was not timed, and there are no layers.
    for each in known.timings:
        each["step_kind"] = {"graph": "compiled-graph"}.get(each["step_kind"], "eager")
    assert backward_s(known, "compiled-graph", 64) == pytest.approx(BACKWARD * line(64) / 2)


def test_the_kinds_that_record_are_those_that_there_are():
    assert set(RECORDS) == {kind.name for kind in KINDS.values() if kind.records}
    assert all(KINDS[like].compiles == KINDS[kind].compiles for kind, like in RECORDS.items())


def test_the_spread_is_that_of_single_steps_at_the_nearest_share():
    known = workload()
    row = next(t for t in known.timings if (t["samples"], t["part"]) == (128, "step"))
    row["step_spread"] = 0.3
    assert [spread_of(known, "eager", samples) for samples in (8, 120)] == [0.03, 0.3]
    # Half the distance of the quartiles of a normal distribution is 0.6745 of its standard deviation.
    row["step_spread"] = None
    assert spread_of(known, "eager", 120) == pytest.approx(0.02 / 0.67449, rel=1e-4)
