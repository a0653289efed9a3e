"""What those beside each other cost, from figures of which every number is known."""

import math

import pytest
from tests.measured import after_work, beside, copies, measurements, sums, timed, turns, two_devices
from tests.workloads import workload

import kway
from kway.cost.beside import LARGE, SMALL, slowdowns, thread_sum_s, turns_s
from kway.cost.collectives import collective_s
from kway.measuring import after_work as measured_after
from kway.measuring import ranks_beside, step_work, threads_beside
from kway.strategies.pricing import priced


def test_the_names_are_those_of_measuring():
    ranks, threads = beside(1, 1), beside(1, 1, "threads")
    assert {each["name"] for each in ranks} == {ranks_beside.SLOWER}
    assert {each["name"] for each in threads} == {threads_beside.SLOWER}
    assert (turns(1)["name"], sums({1: 1})[0]["name"]) == (threads_beside.TURNS, threads_beside.SUM)
    assert after_work({1: 1})[0]["name"] == measured_after.NAME
    assert {LARGE, SMALL} == set(step_work.KINDS) == {each["parameters"]["of"] for each in ranks}


def test_the_nearest_number_that_was_measured_counts_the_larger_one_of_two():
    known = measurements(*beside(1.1, 1.2, count=2), *beside(1.4, 1.6, count=4), *beside(9, 9, "threads", 4))
    assert slowdowns(known, "ranks", 2) == {LARGE: 1.1, SMALL: 1.2}
    assert slowdowns(known, "ranks", 3) == slowdowns(known, "ranks", 64) == {LARGE: 1.4, SMALL: 1.6}


def test_nobody_gets_faster_for_company_and_one_kind_of_work_stands_for_the_other():
    assert slowdowns(measurements(*beside(0.9, 1.2)), "ranks", 2) == {LARGE: 1.0, SMALL: 1.2}
    large, small = beside(1.1, 1.2)
    assert slowdowns(measurements(large), "ranks", 2) == {LARGE: 1.1, SMALL: 1.1}
    assert slowdowns(measurements(small), "ranks", 2) == {LARGE: 1.2, SMALL: 1.2}
    assert slowdowns(None, "ranks", 2) == slowdowns(measurements(), "ranks", 2) == {}


def test_each_thread_has_its_turn():
    known = measurements(turns(1e-3), turns(4e-3, 8))
    assert turns_s(known, 2) == 1e-3
    assert turns_s(known, 3) == pytest.approx(1.5e-3)
    assert turns_s(known, 16) == pytest.approx(8e-3)
    assert turns_s(measurements(), 2) is None


def test_a_sum_of_threads_is_read_between_the_sizes_of_exactly_so_many():
    known = measurements(*sums({1_000: 1e-4, 100_000: 1e-3}))
    found = [thread_sum_s(known, 2, size) for size in (8, 1_000, 10_000, 100_000, 199_000)]
    assert found == pytest.approx([1e-4, 1e-4, math.sqrt(1e-7), 1e-3, 1.9e-3])
    assert thread_sum_s(known, 3, 8) is None
    # One size alone does not tell latency from rate.
    one = measurements(*sums({1_000: 1e-4}))
    assert thread_sum_s(one, 2, 8) == pytest.approx(1e-4)
    assert thread_sum_s(one, 2, 1_001) is None


PLAIN = {1_000: 1e-3, 100_000: 2e-3, 10_000_000: 30e-3}


def all_reduce(size, after, known):
    return collective_s(known, "gloo", "all-reduce", 2, size, after_work=after)


def test_a_collective_after_work_takes_as_many_times_as_long_as_at_the_sizes_that_were_measured():
    known = measurements(*timed(PLAIN), *after_work({1_000: 4e-3, 100_000: 4e-3}))
    assert [all_reduce(size, True, known) for size in (8, 1_000, 100_000)] == pytest.approx([4e-3] * 3)
    assert all_reduce(10_000, True, known) == pytest.approx(4e-3)
    # 2 ms more at the largest size that was measured after work, and beyond it.
    assert all_reduce(10_000_000, True, known) == pytest.approx(32e-3)
    assert [all_reduce(size, False, known) for size in PLAIN] == pytest.approx(list(PLAIN.values()))


def test_sizes_that_were_measured_after_work_alone_count():
    known = measurements(*timed(PLAIN), *after_work({1_000: 1e-3, 10_000: 8e-3, 100_000: 9e-3}))
    assert all_reduce(10_000, True, known) == pytest.approx(8e-3)


def test_where_nothing_was_measured_after_work_it_takes_what_it_takes():
    other = measurements(
        *timed(PLAIN), *after_work({1_000: 9.0}, "all-gather"), *after_work({1_000: 9.0}, ranks=3)
    )
    assert all_reduce(1_000, True, other) == all_reduce(1_000, False, other) == pytest.approx(1e-3)


def test_after_work_more_bytes_never_cost_less():
    known = measurements(*timed(PLAIN), *after_work({1_000: 9e-3, 100_000: 3e-3, 10_000_000: 20e-3}))
    found = [all_reduce(10**power, True, known) for power in range(9)]
    assert found == sorted(found)


LINE = {1_024: 1e-3, 1 << 24: 1e-3}


def on_two(axis, *figures, **changes):
    known = workload(devices=2, **{"collectives": [], **changes})
    return priced({axis: 2}, ["cpu", "cpu"], "eager", known, measurements(*figures), threads=1)


def test_small_operations_are_slowed_down_as_small_ones_and_the_rest_as_large_ones():
    terms = on_two("data", *timed(LINE), *beside(1.5, 3.0), *two_devices(1.0, 9.0)).terms
    # Of 1 ms and 0.1 ms a sample each: 90 % are no input and no optimizer.
    launch, rest = 0.9e-3, 0.1e-3 + 1e-4 * 64
    assert terms["ranks beside each other"] == pytest.approx(2 * launch + 0.5 * rest)
    own = 3 * launch + 1.5 * rest
    assert terms["waiting for the slowest rank"] == pytest.approx(own * 0.03 / math.sqrt(math.pi))


def test_gradients_and_batch_statistics_are_sent_after_work():
    figures = [*timed(LINE), *after_work({1_024: 5e-3}), *timed(LINE, "all-gather")]
    gathers = [{"when": "forward", "what": "all-gather", "bytes": 64, "times": 2}]
    terms = on_two("data", *figures, *after_work({1_024: 7e-3}, "all-gather"), collectives=gathers).terms
    assert terms["all-reduce"] == pytest.approx(5e-3)
    assert terms["batch statistics (all-gather)"] == pytest.approx(14e-3)


def test_of_buckets_that_follow_each_other_only_the_first_follows_work():
    figures = [*timed(LINE), *after_work({1_024: 5e-3})]
    gathers = [{"when": "forward", "what": "all-reduce", "bytes": 64, "times": 1}]
    terms = on_two("data", *figures, collectives=gathers, buckets=[4_000, 4_000, 4_000]).terms
    assert terms["all-reduce"] == pytest.approx(5e-3 + 2 * 1e-3)


@pytest.mark.parametrize(("kind", "seconds"), [("eager", 1e-3), ("compiled", 1e-3), ("graph", 2e-4)])
def test_on_gpus_what_is_recorded_waits_for_no_launch(kind, seconds):
    figures = [
        *timed(dict.fromkeys(LINE, 1e-3), backend="nccl"),
        *after_work({1_024: 2e-4, 1_000_000: 2e-4}, backend="nccl"),
    ]
    known = workload(devices=2, step_kind=kind, collectives=[], device="cuda:0")
    of = priced({"data": 2}, ["cuda:0", "cuda:1"], kind, known, measurements(*figures), threads=1)
    assert of.terms["all-reduce"] == pytest.approx(seconds)


def test_threads_read_in_turns_compute_side_by_side_and_hand_over_what_was_measured():
    figures = [
        *beside(1.5, 3.0, "threads"),
        *beside(9.0, 9.0),
        turns(0.7e-3),
        *sums({1_024: 2e-3, 4_000: 3e-3}),
    ]
    terms = on_two("threads", *figures).terms
    reading, launch = 0.05 * (1e-3 + 1e-4 * 64), 0.9e-3
    rest = 0.95 * (1e-3 + 1e-4 * 64) - launch
    assert terms["input in turns (threads)"] == pytest.approx(reading)
    assert terms["ranks beside each other"] == pytest.approx(2 * launch + 0.5 * rest)
    assert terms["waiting for the slowest rank"] == pytest.approx(
        (3 * launch + 1.5 * rest) * 0.03 / math.sqrt(math.pi)
    )
    assert terms["turns of the process (threads)"] == pytest.approx(0.7e-3)
    assert terms["gather and scatter (threads)"] == pytest.approx(3e-3)


def test_threads_that_draw_on_the_cpu_compute_one_after_the_other():
    figures = [*beside(1.5, 3.0, "threads"), *sums({1_024: 2e-3, 4_000: 3e-3})]
    terms = on_two("threads", *figures, draws_on_cpu=True).terms
    # All of 1 ms and 0.1 ms a sample but optimizer and input, once more.
    assert terms["replicas one after the other (threads)"] == pytest.approx(0.9 * (1e-3 + 1e-4 * 64))
    assert "ranks beside each other" not in terms


def test_collectives_of_a_step_are_sums_of_threads_too():
    both = [
        {"when": "forward", "what": "all-gather", "bytes": 2_000, "times": 3},
        {"when": "backward", "what": "all-reduce", "bytes": 2_000, "times": 1},
    ]
    terms = on_two(
        "threads", *beside(1, 1, "threads"), *sums({2_000: 1e-3, 4_000: 2e-3}), collectives=both
    ).terms
    assert terms["gather and scatter (threads)"] == pytest.approx(2e-3 + 3 * 2e-3 + 1e-3)


def test_threads_without_sums_that_were_measured_copy_and_without_either_there_is_an_error():
    terms = on_two("threads", *beside(1, 1, "threads"), *copies(1e9)).terms
    assert terms["gather and scatter (threads)"] == pytest.approx(3 * 4_000 / 1e9)
    with pytest.raises(kway.NotMeasuredError):
        on_two("threads", *beside(1, 1, "threads"))


def test_threads_of_gpus_go_on_while_the_process_starts_operations():
    figures = [*copies(1e9, "cuda:0", "cuda:1"), turns(5e-3), *beside(9, 9, "threads"), *sums({1_024: 9.0})]

    def terms(**changes):
        known = workload(devices=2, collectives=[], **changes)
        gpus = ["cuda:0", "cuda:1"]
        return priced({"threads": 2}, gpus, "eager", known, measurements(*figures), threads=1).terms

    # Reading and starting take 1.27 ms for each of two, with turns 7.54; a GPU is at it for 7.03.
    reading, launch, compute = 0.05 * (1e-3 + 1e-4 * 64), 0.9e-3, 0.9 * 1e-4 * 64
    expected = 2 * (reading + launch) + 5e-3 - (reading + launch + compute)
    assert terms()["turns of the process (threads)"] == pytest.approx(expected)
    assert terms()["gather and scatter (threads)"] == pytest.approx(3 * 4_000 / 1e9)
    assert not {"ranks beside each other", "input in turns (threads)"} & set(terms())
    assert terms(per_sample_s=1e-2)["turns of the process (threads)"] == 0
