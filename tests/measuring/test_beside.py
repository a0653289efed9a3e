"""Ranks and threads beside each other: what is counted, from known times, and one real measurement in small."""

import time

import pytest
import torch

from kway.comm.group import Group
from kway.jobs.kept_ranks import KeptRanks
from kway.measuring import after_work, behind_work, ranks_beside, threads_beside
from kway.measuring.bench import Bench
from kway.measuring.collective_ranks import Part, title
from kway.measuring.experiment import experiments
from kway.measuring.figure import Maker
from kway.measuring.in_step import InStep
from kway.measuring.noted import Noted, free
from kway.measuring.step_work import ALONE, AT_ONCE, KINDS, LARGE, SMALL, counts, sustained, with_threads
from kway.measuring.timer import Policy, Reading, Timer, Timing

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


def test_work_has_the_threads_that_it_is_given():
    before, seen = torch.get_num_threads(), []
    work = with_threads(lambda: lambda: seen.append(torch.get_num_threads()), before + 1)
    assert work(2) > 0
    assert seen == [before + 1] * 2
    assert torch.get_num_threads() == before


def test_samples_of_the_length_that_counts_are_kept():
    noted = Noted()
    for repeats, values in ((1, [9.0]), (2, [1.0, 2.0]), (2, [2.0, 4.0])):
        noted.note(repeats, values)
    assert noted.of(Timing("x", 2, (7.0,))) == [1.5, 3.0]
    assert noted.of(None) == []


def test_a_collective_costs_what_it_takes_on_the_last_rank_and_what_the_pass_after_it_takes_longer():
    # The largest over ranks of: a pass after a collective, a pass after a pass, and less than nothing.
    assert after_work.cost(5.0, 3.0, -4.0) == 6.0
    call = after_work.between_passes(lambda: time.sleep(0.01), 1)
    cold, warm, least = call()
    assert cold > 0 < warm
    assert least <= -0.01


def test_collectives_after_work_are_told_by_size_where_they_cost_something():
    cells = [("all-reduce", 64), ("all-reduce", 128), ("all-gather", 64)]
    noted = {title(*cell): Noted() for cell in cells}
    timings = {}
    for cell, values in zip(cells, ([0.5, 0.25, 1.0], [-1.0, -1.0, 5.0]), strict=False):
        timings[title(*cell)] = Timing(title(*cell), 4, (9.0,) * 3)
        for value in values:
            noted[title(*cell)].note(4, [value])
    (found,) = after_work.figures_of(Maker("beside"), Part("gloo", 2), Reading(timings), noted, cells)
    assert found.parameters == {"collective": "all-reduce", "backend": "gloo", "ranks": 2, "bytes": 64}
    assert (found.value, found.raw) == (0.5, (0.5, 0.25, 1.0))


def test_what_came_out_at_0_or_below_is_named():
    found = {"all-reduce": [0.0, -1.0, 5.0], "all-gather": [1.0], "broadcast": [], "barrier": [-1.0]}
    assert free("after work", found) == [
        "after work: left out, as it came out at 0 or below: all-reduce, barrier"
    ]
    assert free("after work", {"all-gather": [1.0], "broadcast": []}) == []


def test_an_experiment_names_what_it_leaves_out(monkeypatch):
    """Every sum of threads, and turns, as if they had taken no time."""
    monkeypatch.setattr(threads_beside, "costs", lambda before, step: (0.0, -1.0))
    monkeypatch.setattr(behind_work, "run", lambda bench, part: [])
    bench = Bench("beside", ("cpu", "cuda:0", "cuda:1"), SIZES, QUICK, cpu_ranks=2)
    figures = experiments()["beside"].run(bench)
    assert not {figure.name for figure in figures} & {threads_beside.TURNS, threads_beside.SUM}
    (note,) = bench.notes
    assert note.startswith(
        "2 threads: left out, as it came out at 0 or below: turns of threads, sum of threads of"
    )


def test_turns_are_what_a_step_takes_beside_its_work_and_a_sum_what_the_last_thread_takes_for_it():
    told = threads_beside.Told
    before = [told(9.0, 9.0, 10.0), told(9.0, 9.0, 10.5)]
    # One step of 5.5 from the last thread to the last one; pass and sum of the slowest are 4.
    step = [told(1.0, 3.0, 15.0), told(3.5, 0.25, 16.0)]
    assert threads_beside.costs(before, step) == (1.5, 0.25)


def test_what_threads_told_becomes_figures():
    found = threads_beside.figures_of(Maker("beside"), 2, [0.5, 1.0, 0.5], {64: [2.0], 128: [], 256: [-1.0]})
    assert [(figure.name, figure.value, figure.parameters) for figure in found] == [
        (threads_beside.TURNS, 0.5, {"threads": 2}),
        (threads_beside.SUM, 2.0, {"threads": 2, "bytes": 64}),
    ]


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


def told(context):
    """Return what two repeats, of which each rank tells other numbers, come to."""
    rank = context.world.rank
    noted, numbers = Noted(), iter([(1.0, -rank), (rank, -4.0)])
    work = InStep(Group(rank, context.world.size)).repeats(
        lambda: lambda: next(numbers), cost=pair, noted=noted
    )
    return work(2) > 0, noted.samples


def pair(first, second):
    return 10 * first + second


def test_the_largest_of_each_number_over_the_ranks_counts(ranks):
    # (1, 0) and (1, -4): the mean of 10 and 6.
    assert ranks.run(told) == [(True, [(2, 8.0)])] * 2


def failing(context):
    noted = Noted()

    def broken():
        raise MemoryError("no room here")

    in_step, found = InStep(Group(context.world.rank, context.world.size)), []
    fine = (lambda: (1.0,)) if context.world.rank else broken
    for make in (lambda: fine, (lambda: lambda: (1.0,)) if context.world.rank else broken):
        try:
            in_step.repeats(make, lambda value: value, noted)(2)
        except RuntimeError as error:
            found.append(str(error))
    return found, noted.samples


def test_what_one_rank_cannot_do_or_make_none_does(ranks):
    assert ranks.run(failing) == [(["MemoryError: no room here"] * 2, [])] * 2


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


def test_what_is_sustained_leaves_the_bench_as_it_was(monkeypatch):
    seen = []

    def broken(self, candidates, work):
        seen.append(self._policy)
        raise MemoryError("no room")

    monkeypatch.setattr(Timer, "time", broken)
    usual = Policy(seconds=100.0)
    bench = Bench("beside", ("cpu",), SIZES, usual, cpu_ranks=2)
    with pytest.raises(MemoryError):
        threads_beside.run(bench, 1.0)
    assert bench.policy == usual
    assert seen == [sustained(Policy(seconds=50.0), len(threads_beside.rows(2)))]


def test_one_processor_has_nothing_beside_it():
    bench = Bench("beside", ("cpu",), SIZES, QUICK)
    assert experiments()["beside"].run(bench) == []
    assert "no ranks or threads of a CPU" in bench.notes[0]


def test_sizes_are_named_as_collectives_are():
    for sizes in (experiments()["beside"].quick, experiments()["beside"].full):
        assert tuple(sizes["after_work"]) == after_work.ASKED
