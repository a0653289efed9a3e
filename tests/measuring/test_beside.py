"""Ranks and threads beside each other: what is counted, from known times, and one real measurement in small."""

import time

import pytest
import torch

from kway.comm.group import Group
from kway.jobs.kept_ranks import KeptRanks
from kway.measuring import after_work, ranks_beside, threads_beside
from kway.measuring.bench import Bench
from kway.measuring.collective_ranks import Part, title
from kway.measuring.experiment import experiments
from kway.measuring.figure import Maker
from kway.measuring.in_step import InStep
from kway.measuring.step_work import ALONE, AT_ONCE, KINDS, LARGE, SMALL, counts, sustained, with_threads
from kway.measuring.timer import Policy, Reading, Timing

# So many seconds that nothing is left out, however slow the machine is just now.
QUICK = Policy(seconds=1e6, sample_s=1e-4, rounds=3, tries=1)
SIZES = {
    "after_work": {"all-reduce": (1024, 4096), "all-gather": (1024,), "ordered tree reduction": (1024,)},
    "sums": (1024,),
    "cpu_beside_gpus": False,
    "every_number": False,
}


def test_all_are_measured_first_and_fewer_of_them():
    assert [counts(most, every=False) for most in (1, 2, 3, 8)] == [[], [2], [3, 2], [8, 2, 4]]
    assert counts(5, every=True) == [5, 2, 3, 4]


def test_samples_are_as_long_as_there_is_room_for():
    # Nine samples of each: 3 rounds, and 6 until they are long enough; and of a reference.
    found = [sustained(Policy(seconds=seconds, least_rounds=3), 9).sample_s for seconds in (1e6, 4.5, 0.1)]
    assert found == pytest.approx([0.1, 4.5 / 90, 2e-3])
    assert sustained(Policy(seconds=1e6), 9, 25).sample_s == pytest.approx(0.05)
    assert sustained(Policy(rounds=15), 9).rounds == 5


@pytest.mark.parametrize("kind", KINDS)
def test_work_is_a_forward_and_a_backward_pass_that_draws_nothing(kind):
    state = torch.get_rng_state()
    call = KINDS[kind].make()
    call()
    assert torch.equal(torch.get_rng_state(), state)


def test_work_has_the_threads_that_it_is_given_and_what_follows_it():
    before, seen = torch.get_num_threads(), []
    work = with_threads(
        lambda: lambda: seen.append(torch.get_num_threads()), before + 1, [lambda: seen.append("after")]
    )
    assert work(2) > 0
    assert seen == [before + 1, "after"] * 2
    assert torch.get_num_threads() == before


def test_of_a_collective_after_work_the_work_of_the_same_round_is_taken_off():
    cells = [("all-reduce", 64), ("all-reduce", 128), ("all-gather", 64)]
    timed = {
        after_work.WORK: (1.0, 2.0, 3.0),
        title("all-reduce", 64): (1.5, 2.25, 4.0),
        # No longer than the work alone: noise.
        title("all-reduce", 128): (1.0, 1.0, 4.0),
    }
    timings = {name: Timing(name, 1, raw) for name, raw in timed.items()}
    (found,) = after_work.figures_of(Maker("beside"), Part("gloo", 2), Reading(timings), cells)
    assert found.parameters == {"collective": "all-reduce", "backend": "gloo", "ranks": 2, "bytes": 64}
    assert (found.value, found.raw) == (0.5, (0.5, 0.25, 1.0))


def test_turns_are_beside_work_and_sums_beside_turns():
    timed = {threads_beside.WORK: 1.0, threads_beside.IN_TURNS: 1.5, f"{threads_beside.SUM}: 64": 3.5}
    timings = {name: Timing(name, 1, (seconds,) * 3) for name, seconds in timed.items()}
    found = threads_beside.figures_of(Maker("beside"), 2, timings, (64, 128))
    assert [(figure.name, figure.value) for figure in found] == [
        (threads_beside.TURNS, 0.5), (threads_beside.SUM, 2.0),
    ]  # fmt: skip
    assert found[1].parameters == {"threads": 2, "bytes": 64}


def test_the_slowdown_is_that_of_each_kind_of_work_and_number():
    bench = Bench("beside", ("cpu",), SIZES, QUICK)
    bench.time([], "cpu", 0.1)
    make = Maker("beside")
    figures = [
        make.timed("x", {"of": kind, "ranks": 2, "way": way}, "s", [seconds])
        for kind, way, seconds in ((LARGE, ALONE, 2.0), (LARGE, AT_ONCE, 3.0), (SMALL, ALONE, 1.0))
    ]
    (found,) = ranks_beside.compared(bench, figures, "x", "slower", "ranks")
    assert (found.name, found.value, found.parameters) == ("slower", 1.5, {"of": LARGE, "ranks": 2})


def met(context):
    """Return the seconds of three repeats, of which each rank has another slow one."""
    rank = context.world.rank
    in_step = InStep(Group(rank, context.world.size))
    number = iter(range(100))

    def call():
        time.sleep(0.02 if next(number) % 3 == rank else 0.0)

    return in_step.each(lambda: call)(3)


def test_each_repeat_counts_as_long_as_on_its_slowest_rank(ranks):
    first, second = ranks.run(met)
    # Each rank sleeps once, and not in the same repeat.
    assert first == second >= 0.04


def failing(context):
    in_step = InStep(Group(context.world.rank, context.world.size))

    def make():
        raise MemoryError("no room here")

    try:
        in_step.each(make if context.world.rank else lambda: lambda: None)(2)
    except RuntimeError as error:
        return str(error)


def test_what_one_rank_cannot_make_none_repeats(ranks):
    assert ranks.run(failing) == ["MemoryError: no room here"] * 2


def test_repeats_of_threads_count_as_long_as_in_the_slowest():
    def body(group):
        number = iter(range(-1, 100))

        def call():
            time.sleep(0.02 if next(number) == group.rank else 0.0)

        return call

    whole = threads_beside.together(2, 1, body, spread=True)(2)
    each = threads_beside.together(2, 1, body, spread=True, each=True)(2)
    assert whole >= 0.02
    assert each >= 0.04


def test_the_experiment_measures_ranks_and_threads(ranks):
    before = torch.get_num_threads()
    bench = Bench("beside", ("cpu",), SIZES, QUICK, cpu_ranks=2, on_ranks=KeptRanks(ranks.of(2)))
    figures = experiments()["beside"].run(bench)
    assert not any(reading.left for reading in bench.readings)
    for name, of in ((ranks_beside.SLOWER, "ranks"), (threads_beside.SLOWER, "threads")):
        found = [figure.parameters for figure in figures if figure.name == name]
        assert found == [{"of": kind, of: 2} for kind in KINDS]
    assert all(figure.value > 0 for figure in figures)
    assert (bench.policy, torch.get_num_threads()) == (QUICK, before)
    timed = [figure.parameters for figure in figures if figure.name == after_work.NAME]
    assert {each["backend"] for each in timed} <= {"gloo"}


def test_one_processor_has_nothing_beside_it():
    bench = Bench("beside", ("cpu",), SIZES, QUICK)
    assert experiments()["beside"].run(bench) == []
    assert "nothing beside it" in bench.notes[0]


def test_sizes_are_named_as_collectives_are():
    for sizes in (experiments()["beside"].quick, experiments()["beside"].full):
        assert tuple(sizes["after_work"]) == after_work.ASKED
