"""Terms of whole candidates, of which every number is known."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.measured import copies, measurements, slowdown, timed, two_devices, usual
from tests.workloads import workload

import kway
from kway.comm.buckets import BUCKET_BYTES
from kway.cost.estimate import Estimate
from kway.cost.gradients import copied_s
from kway.strategies.pricing import priced

STEP_S = 1e-3 + 1e-4 * 128


def on(ranks, *, axis="data", known=None, measured=None, device="cpu", **more):
    layout = {axis: ranks} if ranks > 1 else {}
    devices = [device] * ranks if device == "cpu" else [f"{device}:{place}" for place in range(ranks)]
    known = workload() if known is None else known
    return priced(layout, devices, "eager", known, measured or usual(), threads=1, **more)


def test_one_device_takes_what_was_timed_told_apart():
    alone = on(1)
    assert alone.terms == {
        "input": pytest.approx(0.05 * STEP_S),
        "optimizer": pytest.approx(0.05 * STEP_S),
        "launch": pytest.approx(0.9e-3),
        "compute": pytest.approx(0.9 * 1e-4 * 128),
    }
    assert alone.step_s == pytest.approx(STEP_S)
    assert alone.notes == []
    assert alone.fixed == (pytest.approx(1e-3), pytest.approx(0.0, abs=1e-9))
    assert priced({}, ["cpu"], "eager", workload((128,)), None, threads=1).fixed is None


def test_what_stays_is_never_less_than_the_fixed_parts_of_its_terms():
    """A line of the step through noisy times that is fixed by less than the optimizer alone."""
    known = workload()
    fits = [
        {**each, "fixed_s": {"step": 1e-4, "optimizer": 6e-4, "input": 0.0}[each["part"]], "error": 0.2}
        for each in known.fits
        if each["part"] in ("step", "optimizer", "input")
    ]
    alone = on(1, known=replace(known, fits=fits))
    assert alone.terms["launch"] == 0
    assert alone.fixed == (pytest.approx(6e-4), 0.2)


def test_one_device_needs_no_measurements():
    assert priced({}, ["cpu"], "eager", workload(), None, threads=1).step_s == pytest.approx(STEP_S)


def test_two_ranks_are_the_sum_of_their_terms():
    two = on(2, known=workload(devices=2))
    own = 1e-3 + 1e-4 * 64
    spread = 0.03 / math.sqrt(math.pi)
    assert two.samples == 64
    assert two.terms == {
        "input": pytest.approx(0.05 * own),
        "optimizer": pytest.approx(0.05 * own),
        "launch": pytest.approx(0.9e-3),
        "compute": pytest.approx(0.9 * 1e-4 * 64),
        "ranks beside each other": pytest.approx(0.1 * own),
        "waiting for the slowest rank": pytest.approx(1.1 * own * spread),
        # Below the smallest size that was measured: the time of that.
        "batch statistics (all-gather)": pytest.approx(1e-3 + 1e-9 * 1024),
        "batch statistics (all-reduce)": pytest.approx(1e-3 + 1e-9 * 1024),
        "all-reduce": pytest.approx((1e-3 + 1e-9 * 1024) * (4000 / 1024) ** _slope(1024, 1 << 20)),
    }
    assert two.step_s == pytest.approx(sum(two.terms.values()))


def _slope(low, high):
    return math.log((1e-3 + 1e-9 * high) / (1e-3 + 1e-9 * low)) / math.log(high / low)


def test_what_all_give_is_what_is_gathered():
    gathers = [{"when": "forward", "what": "all-gather", "bytes": 1 << 19, "times": 3}]
    two = on(2, known=workload(collectives=gathers))
    assert two.terms["batch statistics (all-gather)"] == pytest.approx(3 * (1e-3 + 1e-9 * (1 << 20)))


def test_the_largest_share_decides():
    assert on(3).samples == 43
    assert on(8, batch_size=3).samples == 1


# 4 layers of 25 MiB, last to first complete after a quarter of backward each.
LARGE = 4 * BUCKET_BYTES


def large(**more):
    base = workload()
    layers = [{**base.layers[0], "parameter_bytes": BUCKET_BYTES}] * 4
    parameters = {**base.parameters, "gradient_bytes": LARGE}
    return workload(**{"layers": layers, "parameters": parameters, "collectives": [], **more})


def reduce_in(seconds, factor=1.0):
    line = {1024: seconds / 100, BUCKET_BYTES: seconds}
    return measurements(
        *timed(line), *timed(line, "ordered tree reduction"), *slowdown({1024: factor}), *copies(1e9)
    )


def test_all_buckets_but_the_last_hide_behind_backward():
    backward = 0.6 * (1e-3 + 1e-4 * 64)
    assert on(2, known=large(), measured=reduce_in(backward / 5)).terms["all-reduce"] == pytest.approx(
        backward / 5
    )
    # Each is slower than a quarter of backward: they queue up behind the first, which began after a quarter.
    seen = on(2, known=large(), measured=reduce_in(backward)).terms["all-reduce"]
    assert seen == pytest.approx((0.25 + 4 - 1) * backward)


def test_a_slowed_backward_is_part_of_the_price():
    backward = 0.6 * (1e-3 + 1e-4 * 64)
    seen = on(2, known=large(), measured=reduce_in(backward / 10, factor=2.0)).terms["all-reduce"]
    assert seen == pytest.approx(backward / 10 + 3 * backward / 20)


def test_a_step_with_collectives_of_its_own_sends_nothing_ahead():
    gathers = [{"when": "forward", "what": "all-reduce", "bytes": 64, "times": 1}]
    seen = on(2, known=large(collectives=gathers), measured=reduce_in(1e-3)).terms["all-reduce"]
    assert seen == pytest.approx(4e-3)


def test_one_compiled_piece_on_a_cpu_hides_nothing():
    known = large()
    for entry in [*known.timings, *known.fits]:
        entry["step_kind"] = "compiled"
    found = priced({"data": 2}, ["cpu"] * 2, "compiled", known, reduce_in(1e-3), threads=1)
    assert found.terms["all-reduce"] == pytest.approx(4e-3)


def test_buckets_that_were_counted_come_before_those_that_are_reckoned():
    known = large(buckets=[LARGE])
    assert on(2, known=known, measured=reduce_in(1e-3)).terms["all-reduce"] > 3e-3


def compiled_on_gpus(**more):
    known = large(**more)
    for entry in [*known.timings, *known.fits]:
        entry["step_kind"] = "compiled"
    line = {1024: 1e-5, BUCKET_BYTES: 1e-4, 2 * BUCKET_BYTES: 1e-3}
    sums = [*timed(line, backend="nccl"), *timed(line, "ordered tree reduction", backend="nccl")]
    measured = measurements(*sums, *copies(1e9))
    return priced({"data": 2}, ["cuda:0", "cuda:1"], "compiled", known, measured, threads=1).terms


def test_buckets_at_which_code_is_cut_grow_with_the_model():
    # Of 100 MiB two of 50. Those of a profile were counted where nothing is cut.
    for terms in (compiled_on_gpus(), compiled_on_gpus(buckets=[BUCKET_BYTES] * 4)):
        assert terms["all-reduce"] == pytest.approx(1e-3)


def test_at_bits_code_is_not_cut_and_hides_nothing():
    assert compiled_on_gpus(level="bits")["ordered tree reduction"] == pytest.approx(4e-4)


def test_level_bits_sums_in_one_order():
    seen = on(2, known=large(level="bits"), measured=reduce_in(1e-6)).terms
    assert seen["ordered tree reduction"] == pytest.approx(1e-6)
    assert "all-reduce" not in seen


def test_gradients_that_lie_in_buckets_count_once():
    # Of one device alone they come as the activations go; the vectors of several are there all the time.
    one, two = on(1), on(2)
    assert (one.memory["gradients"], two.memory["gradients"]) == (0, 4_000)
    assert two.memory["activations"] < one.memory["activations"]
    assert two.memory_bytes == pytest.approx(sum(two.memory.values()))
    # A replica among threads lays them down once more, which shows where activations are fewer.
    few = {
        **workload().memory,
        "activation_bytes_per_sample": 0.0,
        "activation_fixed_bytes": 1_000,
        "peak": [],
    }
    for axis, laid in (("data", 0), ("threads", 4_000)):
        held = on(2, axis=axis, known=workload(collectives=[], memory=few)).memory
        assert (held["gradients"], held.get("gradients for the other threads", 0)) == (4_000 + 3_000, laid)


def test_threads_hand_their_sums_on_through_memory():
    two = on(2, axis="threads", known=workload(collectives=[]))
    assert two.terms["gather and scatter (threads)"] == pytest.approx(3 * 4_000 / 1e9)
    # Launches of two take 1.8 ms; a replica needs 0.9 + 5.76 ms.
    assert two.terms["turns of the process (threads)"] == 0


def test_threads_start_their_operations_one_after_the_other():
    slow = workload(fixed_s=0.1, collectives=[])
    two = on(2, axis="threads", known=slow)
    assert two.terms["turns of the process (threads)"] == pytest.approx(2 * 0.09 - (0.09 + 0.9 * 1e-4 * 64))


def test_ranks_on_gpus_have_cores_of_their_own():
    assert "ranks beside each other" not in on(2, device="cuda", measured=usual(backend="nccl")).terms


def test_a_profile_of_one_device_alone_is_said_to_lack_something():
    assert any("profile for several" in line for line in on(2).notes)
    assert not on(2, known=workload(devices=2)).notes


def test_where_the_machine_is_not_here_no_profile_of_this_one_is_advised():
    known = usual(backend="nccl")
    there = replace(known, experiments=[{**each, "how": "estimated"} for each in known.experiments])
    (line,) = on(2, device="cuda", measured=there).notes
    assert "plan on a machine with several GPUs" in line
    assert "profile for several" not in line


def test_what_was_not_measured_is_an_error():
    with pytest.raises(kway.NotMeasuredError, match="among 2 ranks through gloo"):
        on(2, measured=measurements(*two_devices(1, 1)))
    with pytest.raises(kway.NotMeasuredError, match=r"a sum over 2 threads.*--only beside"):
        on(2, axis="threads", measured=measurements(*two_devices(1, 1)))


@given(
    ranks=st.integers(1, 4),
    batch=st.integers(1, 500),
    fixed=st.floats(0, 1),
    each=st.floats(0, 1e-2),
    axis=st.sampled_from(["data", "threads"]),
)
def test_terms_are_exposed_seconds_that_add_up_and_more_samples_never_cost_less(
    ranks, batch, fixed, each, axis
):
    known = workload(fixed_s=fixed, per_sample_s=each)
    found = on(ranks, axis=axis, known=known, batch_size=batch)
    more = on(ranks, axis=axis, known=known, batch_size=2 * batch)
    assert all(math.isfinite(seconds) and seconds >= 0 for seconds in found.terms.values())
    assert found.step_s == pytest.approx(sum(found.terms.values()))
    assert found.step_s <= more.step_s * (1 + 1e-9) + 1e-12
    assert found.memory_bytes <= more.memory_bytes
    named = any("all-" in term or "gather and scatter" in term for term in found.terms)
    assert named == (ranks > 1)


@given(st.integers(1, 10**9), st.integers(1, 10**9))
def test_more_bytes_of_gradients_never_cost_less(one, other):
    less, more = sorted((one, other))

    def term(size):
        parameters = {**workload().parameters, "gradient_bytes": size}
        return on(2, known=workload(parameters=parameters)).terms["all-reduce"]

    assert term(less) <= term(more) * (1 + 1e-9)


def test_a_copy_of_more_bytes_never_takes_less():
    """Two sizes whose rates differ: a latency of about a microsecond, and 20 GB/s."""
    sizes = {1024: 1e9, 1 << 20: 20e9}
    measured = measurements(*(each for size, rate in sizes.items() for each in copies(rate, sizes=(size,))))
    estimate = Estimate(workload(), measured, ("cpu", "cpu"), "eager", 128, 64, threads=1)
    seconds = [copied_s(estimate, size) for size in (1, 1024, 1025, 32_768, 1 << 20, (1 << 20) + 1, 1 << 22)]
    assert seconds == sorted(seconds)
    assert seconds[0] == seconds[1] == pytest.approx(1024 / 1e9)
    assert seconds[-1] == pytest.approx((1 << 22) / 20e9)
