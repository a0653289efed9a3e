"""How steps are timed in turns: on sittings whose clock only moves when a step is taken."""

import math

import pytest

from kway.errors import OutOfMemoryError
from kway.profiling.seats import Seat
from kway.profiling.timing import (
    LEAST_ROUNDS,
    MOST_ROUNDS,
    WORTH_SAYING_S,
    fits,
    time_in_turns,
    timings,
)


class Clock:
    def __init__(self):
        self.now, self.order = 0.0, []

    def __call__(self):
        return self.now


class Fake:
    """Takes ``fixed + each * samples`` seconds a step, a third of it forward; raises ``fails`` by samples."""

    def __init__(self, clock, seat, fixed, each, fails=None, lasts=0.0):
        self.lasts = lasts
        self.clock, self.seat, self.shares = clock, seat, seat.shares
        self._line, self._fails = (fixed, each), fails or {}

    def step_s(self, samples):
        return self._line[0] + self._line[1] * samples

    def warm(self, samples, steps):
        if samples in self._fails:
            raise self._fails[samples]
        self.clock.now += steps * self.step_s(samples)
        return self.step_s(samples)

    def leave(self, samples):
        self.shares = tuple(each for each in self.shares if each != samples)

    def window(self, samples, steps, reading, parts):
        self.clock.order.append((self.seat.devices, samples, steps))
        self.clock.now += (1 + steps * (2 if parts else 1)) * self.step_s(samples)
        reading.step.append(self.step_s(samples))
        reading.single.append([0.5, 1.5])
        if parts:
            reading.parts.setdefault("forward", []).append(self.step_s(samples) / 3)


def two(clock, **more):
    return [
        Fake(clock, Seat(1, 2, (64, 32)), 0.25e-3, 2**-14, **more),
        Fake(clock, Seat(2, 1, (32, 16)), 0.5e-3, 2**-13),
    ]


def test_each_round_begins_with_the_next_share_and_lines_are_found_again():
    clock = Clock()
    found, left = time_in_turns(two(clock), 1.0, parts=True, clock=clock)
    assert left == []
    spots = [(1, 64), (1, 32), (2, 32), (2, 16)]
    turns = [order[:2] for order in clock.order]
    assert turns[:4] == spots
    assert turns[4:8] == [*spots[1:], spots[0]]
    rows = timings("eager", found)
    assert [(row["devices"], row["samples"]) for row in rows if row["part"] == "step"] == spots
    assert all(row["spread"] == 0 for row in rows)
    # Two steps of 0.5 and 1.5 lie 1 apart; of parts single ones are not timed.
    of_steps = [row["step_spread"] for row in rows if row["part"] == "step"]
    assert of_steps == pytest.approx([math.sqrt(math.pi) / 2] * 4)
    assert {row["step_spread"] for row in rows if row["part"] != "step"} == {None}
    alone, several = (fit for fit in fits(rows) if fit["part"] == "step")
    assert (alone["several"], alone["fixed_s"]) == (False, pytest.approx(0.25e-3))
    assert (several["several"], several["per_sample_s"]) == (True, pytest.approx(2**-13))
    forward = next(fit for fit in fits(rows) if fit["part"] == "forward")
    assert forward["per_sample_s"] == pytest.approx(2**-14 / 3)


@pytest.mark.parametrize("seconds", [0.5, 2.0])
def test_rounds_end_with_the_seconds_there_are(seconds):
    clock = Clock()
    time_in_turns(two(clock), seconds, parts=False, clock=clock)
    assert clock.now <= seconds
    assert len(clock.order) >= 4 * LEAST_ROUNDS


def test_three_rounds_of_one_step_are_taken_in_any_case_and_not_endlessly_many():
    clock = Clock()
    time_in_turns(two(clock), 0.0, parts=False, clock=clock)
    assert [steps for *_, steps in clock.order] == [1] * 4 * LEAST_ROUNDS
    clock = Clock()
    time_in_turns(two(clock), 1e9, parts=False, clock=clock)
    assert [steps for *_, steps in clock.order] == [10] * 4 * MOST_ROUNDS


def test_where_the_end_of_a_window_costs_something_a_window_lasts_whatever_time_there_is():
    clock = Clock()
    # Steps of 0.25, 0.125 and 0.0625 s.
    time_in_turns(
        [Fake(clock, Seat(1, 1, (64, 32, 16)), 0.0, 2**-8, lasts=2.0)], 0.0, parts=True, clock=clock
    )
    assert clock.order[:3] == [(1, 64, 8), (1, 32, 16), (1, 16, 32)]
    assert len(clock.order) == 3 * LEAST_ROUNDS


def test_what_fails_at_a_smaller_share_is_left_out_and_at_the_jobs_own_is_raised():
    clock = Clock()
    found, left = time_in_turns(
        two(clock, fails={32: ValueError("one value")}), 0.1, parts=False, clock=clock
    )
    assert [(sitting.seat.devices, samples) for (sitting, samples), _ in found] == [(1, 64), (2, 32), (2, 16)]
    assert left == ["shares of 32 samples were left out: ValueError: one value"]
    with pytest.raises(ValueError, match="mine"):
        time_in_turns(two(Clock(), fails={64: ValueError("mine")}), 0.1, parts=False, clock=Clock())
    sittings = two(clock, fails={64: OutOfMemoryError("out of memory", "9 GiB were asked for\nby part")})
    found, left = time_in_turns(sittings, 0.1, parts=False, clock=clock)
    assert left == ["shares of 64 samples were left out: out of memory: 9 GiB were asked for"]
    assert sittings[0].shares == (32,)


@pytest.mark.parametrize(("step_s", "parts"), [(1.0, True), (1.0, False), (0.5 * WORTH_SAYING_S, True)])
def test_steps_that_take_longer_than_there_is_time_for_say_how_long(step_s, parts):
    clock, told = Clock(), []

    def longer(rest_s):
        told.append((rest_s, clock.now))

    time_in_turns(
        [Fake(clock, Seat(1, 1, (4, 2)), step_s, 0.0)], 1.0, parts=parts, clock=clock, longer=longer
    )
    ((rest_s, since),) = told
    assert clock.now - since == pytest.approx(rest_s)


def test_steps_that_there_is_time_for_are_no_surprise():
    clock = Clock()
    time_in_turns(two(clock), 1.0, parts=True, clock=clock, longer=pytest.fail)
