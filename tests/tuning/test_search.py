"""The search, on times that are made up."""

import pytest

from kway.tuning.knobs import Stage
from kway.tuning.search import CHANGED, OVERTAKEN, Reading, faster, search

PLAIN = "the step as it is"
FUSED = {"optimizer": "fused"}


class Machine:
    """Answers with the time of a choice; ``left`` falls by what each trial costs, and by ``late`` more."""

    def __init__(self, seconds, budget=100.0, late=0.0, readings=()):
        self.seconds, self.budget, self.one, self.late, self.asked = seconds, budget, 1.0, late, []
        self.readings = dict(readings)

    def measure(self, choice):
        self.asked.append(choice)
        self.budget -= self.one + self.late
        key = tuple(sorted(choice.items()))
        return self.readings.get(key) or Reading((self.seconds(choice),) * 5, self.one)

    def find(self, stages, start=1.0):
        first = Reading((start,) * 5, self.one)
        return search(stages, self.measure, self.cost, self.cost, lambda: self.budget, first)

    def cost(self, choice):
        return self.one


A = Stage("a", ({"optimizer": "foreach"}, {"optimizer": "fused"}))
B = Stage("b", ({"autotune": True},))


def of(choice):
    return 1.0 - 0.2 * (choice.get("optimizer") == "fused") - 0.1 * (choice.get("autotune") is True)


def test_the_fastest_of_each_stage_stays_and_the_next_stage_builds_on_it():
    machine = Machine(of)
    found = machine.find([A, B])
    assert found.best == {"optimizer": "fused", "autotune": True}
    assert machine.asked == [
        *({"optimizer": form} for form in ("foreach", "fused")),
        found.best,
        {},
        found.best,
    ]
    assert [row.verdict for row in found.rows] == ["baseline", f"no faster than {PLAIN}", OVERTAKEN, "chosen"]


def test_what_does_not_agree_is_discarded_however_fast_it_is():
    wrong = Reading((0.1,) * 5, 1.0, difference="weight differs by 1, 1e-06 is allowed")
    machine = Machine(of, readings={(("optimizer", "fused"),): wrong})
    found = machine.find([A])
    assert found.best == {}
    assert found.rows[2].verdict == "discarded: weight differs by 1, 1e-06 is allowed"
    assert found.rows[0].verdict == "chosen"


def test_what_cannot_run_is_refused_with_its_reason():
    machine = Machine(of, readings={(("optimizer", "fused"),): Reading(refused="no kernel")})
    assert machine.find([A]).rows[2].verdict == "refused: no kernel"


def test_what_takes_longer_than_is_left_is_not_begun():
    # One trial, and what is measured once more at the end: two.
    machine = Machine(of, budget=3.5)
    found = machine.find([A, B])
    assert machine.asked == [{"optimizer": "foreach"}]
    assert [row.verdict.startswith("not tried: it takes about 1 s") for row in found.rows] == [
        False,
        False,
        True,
        True,
    ]
    assert found.best == {}


@pytest.mark.parametrize(("budget", "tried"), [(8.5, 1), (10.5, 1), (11.0, 2)])
def test_time_to_measure_the_winner_again_is_left_whoever_wins(budget, tried):
    made = {"step_kind": "compiled"}
    machine = Machine(lambda choice: 0.8 if choice == made else 0.9 if choice else 1.0, budget)
    machine.one = 2.5

    def again(choice):
        return 5.0 if choice == made else 1.0

    stage, start = Stage("a", (made, {"optimizer": "fused"})), Reading((1.0,) * 5, 1.0)
    found = search([stage], machine.measure, lambda choice: 2.5, again, lambda: machine.budget, start)
    # 6 s for the winner and the step as it is: without them the other one would fit in.
    assert [row.reading is not None for row in found.rows[1:]] == [True, tried == 2]
    assert (found.best, found.again) == (made, pytest.approx(0.8))


def test_a_gain_within_the_spread_is_none():
    noisy = Reading((0.9, 0.95, 1.0, 0.85, 0.9), 1.0)
    assert not faster(noisy, Reading((0.98, 0.93, 0.95, 1.05, 0.9)))
    assert faster(noisy, Reading((1.2,) * 5))
    assert not faster(Reading((0.995,) * 5), Reading((1.0,) * 5))


def test_a_winner_that_does_not_win_again_is_not_chosen():
    class Drifting(Machine):
        def measure(self, choice):
            reading = super().measure(choice)
            # The machine was slow while the first reading was taken: all that came later is faster.
            return reading if choice else Reading((0.5,) * 5, 1.0)

    found = Drifting(of).find([A])
    assert found.best == {}
    assert [row.verdict for row in found.rows] == [
        "chosen",
        f"no faster than {PLAIN}",
        "won, but not when measured again",
        "baseline, measured again",
        f"slower than {PLAIN}, when measured again",
    ]
    # Each stands beside what it was judged by: the second pair beside the second time of the step as it is.
    beside = [(row.plain or found.rows[0].reading).median_s for row in found.rows]
    assert beside == [1.0, 1.0, 1.0, 0.5, 0.5]


class Slowed(Machine):
    """A machine that becomes 1.85 times as slow before what had won is measured again, and is it alike from then on."""

    def __init__(self, then):
        super().__init__(of)
        self.then = then

    def measure(self, choice):
        later = choice in [{}, *self.asked]
        reading = super().measure(choice)
        return Reading((1.85 * (self.then if choice else 1.0),) * 5, 1.0) if later else reading


def test_a_winner_that_the_machine_alone_made_slower_is_not_decided_and_not_chosen():
    found = Slowed(0.95).find([Stage("a", (FUSED,))])
    assert (found.best, found.undecided) == ({}, True)
    assert [row.verdict for row in found.rows[1:]] == [
        CHANGED,
        "baseline, measured again",
        "not decided: the machine changed meanwhile (the step as it is took 1.85 times its first time, and this "
        "0.95 of that)",
    ]
    # What loses beside its neighbour has lost, whatever the machine did.
    lost = Slowed(1.02).find([Stage("a", (FUSED,))])
    assert (lost.best, lost.undecided) == ({}, False)
    assert lost.rows[-1].verdict == f"slower than {PLAIN}, when measured again"
    assert not Machine(of).find([A]).undecided


def test_a_verdict_against_another_choice_says_the_ratio_to_that_one():
    """0.9 of the step as it is, and still slower: than the 0.8 that was found before."""
    third = Stage("c", ({"autotune": True}, {"threads": 1}))
    times = {(): 1.0, ("optimizer",): 0.8, ("optimizer", "autotune"): 0.9, ("optimizer", "threads"): 0.804}
    found = Machine(lambda choice: times[(*choice,)]).find([Stage("a", (FUSED,)), third])
    assert [row.verdict for row in found.rows[2:]] == [
        "slower than the best so far (1.125 of it)",
        "slower than the best so far (1.005 of it)",
    ]


@pytest.mark.parametrize(
    ("later", "said"),
    [
        (Reading(refused="no memory", cost_s=1.0), "refused: no memory, when measured again"),
        (Reading((0.1,) * 5, 1.0, difference="bias differs"), "discarded: bias differs, when measured again"),
    ],
)
def test_a_winner_that_fails_or_differs_the_second_time_is_told_so(later, said):
    class Failing(Machine):
        def measure(self, choice):
            return later if choice in self.asked else super().measure(choice)

    found = Failing(of).find([Stage("a", ({"optimizer": "fused"},))])
    assert (found.best, found.again, found.rows[-1].verdict) == ({}, None, said)


def test_a_winner_that_nobody_can_measure_again_has_to_win_clearly():
    clear = Machine(lambda choice: 0.8 if choice else 1.0, budget=3.5, late=1.0)
    assert clear.find([Stage("a", ({"optimizer": "fused"},))]).best == {"optimizer": "fused"}
    late = Machine(lambda choice: 0.97 if choice else 1.0, budget=3.5, late=1.0)
    found = late.find([Stage("a", ({"optimizer": "fused"},))])
    assert found.best == {}
    assert found.rows[1].verdict == "no time to measure it again, and the gain is small"


@pytest.mark.parametrize("count", [1, 2, 5])
def test_spread_leaves_out_the_outermost_of_five(count):
    reading = Reading((1.0, 1.0, 1.0, 1.0, 9.0)[-count:])
    assert reading.spread == (0 if count != 2 else 8 / 5)


def test_a_winner_that_is_measured_once_more_says_by_how_much_it_won_then():
    assert Machine(of).find([A]).again == pytest.approx(0.8)
    assert Machine(of, budget=4.5, late=0.4).find([A]).again is None
    assert Machine(lambda choice: 1.0).find([A]).again is None
