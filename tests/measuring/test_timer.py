"""The policy of timing, on a clock that only moves when work is done."""

import pytest

from kway.measuring.timer import (
    Calibration,
    Candidate,
    Policy,
    Reading,
    Timer,
    Timing,
    calibrate,
    drift,
    noisy,
    quantile,
    spread,
)


class Machine:
    """Work takes what ``cost`` says at the time it is done; every call is noted with its repeats."""

    def __init__(self):
        self.now, self.done = 0.0, []

    def clock(self):
        return self.now

    def work(self, name, cost):
        def run(count):
            took = count * (cost(self) if callable(cost) else cost)
            self.now += took
            self.done.append((name, count))
            return took

        return run

    def time(self, costs, policy=None, reference=1e-4, **more):
        candidates = [
            Candidate(name, self.work(name, cost), **more.get(name, {})) for name, cost in costs.items()
        ]
        timer = Timer(policy or Policy(), self.clock)
        return timer.time(candidates, self.work("reference", reference))


def test_a_sample_is_as_long_as_asked_for():
    machine = Machine()
    found = calibrate(machine.work("x", 3e-6), 2e-3)
    assert 2e-3 <= found.took <= 4e-3
    assert found.took == pytest.approx(found.repeats * 3e-6)
    assert machine.done[0] == ("x", 1)  # warmed up before it counts


def test_what_takes_longer_than_a_sample_is_done_once():
    machine = Machine()
    assert calibrate(machine.work("x", 0.5), 2e-3) == Calibration(1, 0.5)
    assert len(machine.done) == 2


def test_what_is_known_to_take_long_is_called_once():
    machine = Machine()
    assert calibrate(machine.work("x", 0.5), 2e-3, machine.clock, expected=0.3) == Calibration(1, 0.5)
    assert len(machine.done) == 1
    # Not where it could be no longer than a sample.
    assert calibrate(machine.work("x", 1e-3), 2e-3, expected=0.01).repeats == 3


def test_a_clock_that_stands_still_meanwhile_is_not_believed():
    machine = Machine()
    work = machine.work("x", 0.5)
    assert calibrate(lambda count: work(count) / 100, 2e-3, machine.clock).took == 0.5


def test_a_clock_that_sees_nothing_ends_all_the_same():
    assert calibrate(lambda count: 0.0, 2e-3) == Calibration(1 << 24, 0.0)


def test_candidates_come_round_by_round_and_each_is_first_in_turn():
    machine = Machine()
    reading = machine.time({"a": 1e-2, "b": 1e-2, "c": 1e-2}, Policy(rounds=4, sample_s=1e-3))
    # Two calls of each to calibrate it, then the reference, and after each round again.
    begun = next(i for i in range(len(machine.done)) if machine.done[i][0] == "c") + 2
    order = "".join(name[0] for name, _ in machine.done[begun:])
    assert order == "rabcrbcarcabrabcr"
    assert {name: len(timing.raw) for name, timing in reading.timings.items()} == dict.fromkeys("abc", 4)
    assert reading.timings["b"].seconds == pytest.approx(1e-2)
    assert (reading.tries, reading.drift, noisy([reading]), reading.left) == (1, 0.0, "", {})


def test_raw_values_are_of_one_repeat_and_the_median_ignores_an_outlier():
    machine = Machine()

    def cost(machine):
        rounds = sum(name == "reference" for name, _ in machine.done)
        return 5e-5 if rounds == 6 else 1e-5

    timing = machine.time({"a": cost}).timings["a"]
    assert len(timing.raw) == Policy().rounds
    assert max(timing.raw) == pytest.approx(5e-5)
    assert timing.seconds == pytest.approx(1e-5)


def test_a_drift_of_the_reference_repeats_the_rounds_until_it_stands_still():
    machine = Machine()
    # It falls to a half within the first try, whose six rounds end after 0.08 s.
    reading = machine.time(
        {"a": 1e-2}, Policy(rounds=6, seconds=100), lambda m: 1e-4 * (2 - min(m.now / 0.08, 1))
    )
    assert reading.tries == 2
    assert reading.drift == 0.0
    assert noisy([reading]) == ""


def test_a_machine_that_never_stands_still_is_said_to_be_noisy_after_three_tries():
    machine = Machine()
    reading = machine.time({"a": 1e-2}, Policy(rounds=6, seconds=100), lambda m: 1e-4 * (1 + 5 * m.now))
    assert reading.tries == 3
    assert reading.drift > 0.05
    assert "drifted by" in noisy([reading])
    assert "3 tries" in noisy([reading])
    assert len(reading.timings["a"].raw) == 6


def test_the_calmest_try_counts():
    # The reference moves less and less: the last of three tries is the calmest.
    machine = Machine()
    reading = machine.time({"a": 1e-2}, Policy(rounds=6, seconds=100), lambda m: 1e-4 * (1 + 10 * m.now**0.5))
    again = Machine()
    once = again.time(
        {"a": 1e-2}, Policy(rounds=6, seconds=100, tries=1), lambda m: 1e-4 * (1 + 10 * m.now**0.5)
    )
    assert reading.tries == 3
    assert reading.drift < once.drift


def test_samples_that_lie_far_apart_are_said_to_be_noise():
    machine = Machine()
    reading = machine.time({"a": lambda m: 1e-2 * (1 + len(m.done) % 4)})
    assert reading.drift == 0.0
    assert "spread over" in noisy([reading])


def test_what_several_sets_have_in_common_is_said_once_and_which_they_are():
    def reading(name, apart, moved=0.0):
        return Reading({name: Timing(name, 1, (1.0, 1.0 + apart))}, drift=moved, tries=3)

    calm, one, other = reading("a", 0.0), reading("b (n 1)", 1.0), reading("c", 2.0)
    assert noisy([calm, calm]) == ""
    assert noisy([one]) == "samples of the typical candidate spread over 53% of their median"
    assert noisy([calm, one, other]) == (
        "samples of the typical candidate spread over 53% to 80% of their median (in 2 of 3 sets that were timed: "
        "b, c)"
    )
    assert noisy([reading("d", 2.0, 0.07), calm, one]) == (
        "a reference workload drifted by 7% between rounds in each of 3 tries (in 1 of 3 sets that were timed: d); "
        "samples of the typical candidate spread over 53% of their median (in 1 of 3 sets that were timed: b)"
    )
    # Where everything was left out nothing names the set.
    assert noisy([Reading({}, drift=0.07), calm]) == (
        "a reference workload drifted by 7% between rounds and there was no time to try again (in 1 of 2 sets that "
        "were timed)"
    )


@pytest.mark.parametrize("seconds", [0.5, 2.0])
def test_the_budget_is_kept_with_fewer_rounds(seconds):
    machine = Machine()
    reading = machine.time({"a": 0.02, "b": 0.05}, Policy(rounds=1000, seconds=seconds))
    assert machine.now <= seconds
    assert 3 <= len(reading.timings["a"].raw) < 1000
    assert not reading.left


def test_a_try_leaves_room_for_another():
    machine = Machine()
    policy = Policy(rounds=1000, seconds=10)
    reading = machine.time({"a": 1e-2}, policy, lambda m: 1e-4 * (1 + m.now))
    assert reading.tries == 3
    assert machine.now <= policy.seconds


def test_what_has_no_room_is_left_out_before_it_is_begun():
    machine = Machine()
    family = {f"n{n}": {"family": "product", "work": n**3} for n in (8, 16, 64)}
    reading = machine.time({f"n{n}": 2e-5 * n**3 for n in (8, 16, 64)}, Policy(seconds=5), **family)
    assert set(reading.timings) == {"n8", "n16"}
    assert "no time for it in the 5 s" in reading.left["n64"]
    assert "n64" not in dict(machine.done)
    assert machine.now <= 5


def test_what_is_too_short_to_tell_says_nothing_of_larger_ones():
    machine = Machine()
    family = {f"n{n}": {"family": "product", "work": n**3} for n in (4, 512)}
    reading = machine.time({"n4": 1e-5, "n512": 1e-2}, Policy(seconds=5), **family)
    assert set(reading.timings) == {"n4", "n512"}


def first_takes(more):
    """Return a cost of 1e-2 that is so much higher at the first call."""
    return lambda machine: 1e-2 + (0.0 if any(name == "slow to start" for name, _ in machine.done) else more)


def test_what_first_calls_take_more_leaves_nothing_out():
    # Libraries of a GPU, connections of a collective: 60 times the budget.
    machine = Machine()
    costs = {"slow to start": first_takes(30.0), "next": 1e-2}
    reading = machine.time(costs, Policy(seconds=0.5, rounds=7))
    assert not reading.left
    assert len(reading.timings["next"].raw) == 7
    assert reading.seconds < 0.5
    assert machine.now > 30


def test_a_slow_start_says_nothing_of_larger_ones():
    machine = Machine()
    family = {name: {"family": "sum", "work": work} for name, work in (("slow to start", 1), ("large", 100))}
    costs = {"slow to start": first_takes(1.0), "large": 2e-2}
    assert not machine.time(costs, Policy(seconds=20), **family).left


def test_what_became_too_short_to_tell_is_no_reason_to_leave_larger_ones_out():
    # The smallest takes 1 ms because of a launch, as do ten times as much; the largest is thought to take 1 s by it.
    machine = Machine()
    family = {name: {"family": "sum", "work": work} for name, work in (("a", 1), ("b", 10), ("c", 1000))}
    reading = machine.time({"a": 1e-3, "b": 1e-4, "c": 5e-3}, Policy(seconds=2), **family)
    assert not reading.left


def test_what_raises_is_left_out_with_the_reason():
    machine = Machine()

    def broken(count):
        raise RuntimeError("no kernel for it\nand more")

    candidates = [Candidate("a", broken), Candidate("b", machine.work("b", 1e-3))]
    reading = Timer(Policy(), machine.clock).time(candidates, machine.work("reference", 1e-3))
    assert reading.left == {"a": "RuntimeError: no kernel for it"}
    assert set(reading.timings) == {"b"}


def test_two_of_one_name_are_a_mistake():
    with pytest.raises(ValueError, match="one name"):
        Timer(Policy()).time([Candidate("a", lambda n: 1.0)] * 2, lambda n: 1.0)


def test_spread_and_drift():
    assert quantile([3, 1, 2], 0.5) == 2
    assert quantile([0, 10], 0.9) == pytest.approx(9)
    assert spread([5.0]) == 0
    assert spread([1.0] * 20 + [100.0]) == 0
    assert spread(list(range(1, 12))) == pytest.approx(8 / 6)
    assert drift([1.0, 1.0]) == 0
    assert drift([1.0, 1.0, 1.1, 1.1, 1.2, 1.2]) == pytest.approx(0.2 / 1.1)
    assert drift([1.0, 9.0, 1.0] * 3) == 0  # single outliers are no drift


def test_what_an_interrupted_sample_says_is_too_long_is_looked_at_again():
    """The first sample of the small one takes a hundred times as long: by that the large one would take 40 s."""
    machine = Machine()
    family = {f"n{n}": {"family": "product", "work": n**3} for n in (256, 1024)}
    costs = {"n256": lambda m: 0.625 if m.done.count(("n256", 1)) == 1 else 6.25e-3, "n1024": 0.1}
    reading = machine.time(costs, Policy(seconds=4.05), **family)
    assert not reading.left
    assert reading.timings["n1024"].seconds == pytest.approx(0.1)
    assert machine.now <= 4.05
    # What does take too long is left all the same, and costs no more than another look at the small one.
    machine = Machine()
    reading = machine.time({**costs, "n1024": 40.0, "n256": 0.625}, Policy(seconds=4.05), **family)
    assert list(reading.left) == ["n1024"]
    assert not any(name == "n1024" for name, _ in machine.done)
    assert machine.now <= 4.05
