"""Processes: that each way does the same work, what its times say, and one real measurement in small."""

from contextlib import ExitStack

import pytest

from kway.data.fork_server import Context
from kway.measuring.bench import Bench
from kway.measuring.by_processes import EACH, POOL, SERIAL, Processes
from kway.measuring.experiment import experiments
from kway.measuring.experiments import processes
from kway.measuring.figure import Maker
from kway.measuring.fit import knee
from kway.measuring.loading import BATCH, BATCHES, Crafted, counts, requests
from kway.measuring.tasks import REQUEST, TASKS, compute, cut, wait
from kway.measuring.timer import Policy

# So many seconds that nothing is left out, however slow the machine is just now.
SMALL = Policy(seconds=1e6, sample_s=1e-4, rounds=1, tries=1)


def test_lists_are_cut_into_balanced_parts():
    assert [list(part) for part in cut([1, 2, 3, 4, 5], 2)] == [[1, 2], [3, 4, 5]]
    assert [list(part) for part in cut([1, 2], 4)] == [[1], [2]]


def test_waits_are_one_for_each_request(monkeypatch):
    naps = []
    monkeypatch.setattr("kway.measuring.tasks.time.sleep", naps.append)
    values = [1.0] * (2 * REQUEST + 1)
    assert wait(values) == values
    assert len(naps) == 3


def test_every_way_does_the_same_work(zygotes):
    values = [float(index) for index in range(7)]
    with ExitStack() as opened:
        ways = Processes(Context.preloaded(), 2, opened)
        for task in TASKS.values():
            assert ways.in_pool(task, values) == ways.in_new_ones(task, values) == task(values)
    assert compute([0.0]) == pytest.approx([6**0.5])


def tasks_of(kind, times):
    make = Maker("processes")
    return [
        make.timed(processes.title(kind), {"way": way, "elements": elements}, "s", [seconds])
        for way, curve in times.items()
        for elements, seconds in curve.items()
    ]


def test_the_size_from_which_processes_pay():
    bench = Bench("processes", ("cpu",), {}, SMALL)
    curves = {
        SERIAL: {10: 1e-5, 1000: 1e-3, 100_000: 1e-1},
        POOL: {10: 1e-3, 1000: 1e-3 * 10**0.5, 100_000: 1e-2 * 10**0.5},
        EACH: {10: 0.2, 100_000: 0.2},
    }
    (mark,) = processes.paying(bench, "compute-bound", tasks_of("compute-bound", curves))
    assert mark.parameters == {"marks": "compute-bound tasks", "way": POOL}
    assert mark.value == pytest.approx(10_000)
    assert bench.notes == [
        f"compute-bound tasks: {EACH} takes no less time than one process up to 100,000 elements"
    ]


def test_the_knee_is_the_fewest_that_do_nearly_as_much():
    assert knee([0, 1, 2, 4], [100.0, 95.0, 190.0, 200.0]) == 2
    assert knee([0, 1], [100.0, 50.0]) == 0


@pytest.mark.parametrize(
    ("at", "best", "said"),
    [
        (
            2,
            4,
            "with 2 workers 95% as many samples a second are read as with 4, the most (0, 1, 2, 4 were tried)",
        ),
        (
            1,
            4,
            "with 1 worker 47% as many samples a second are read as with 4, the most (0, 1, 2, 4 were tried)",
        ),
        (1, 1, "with 1 worker the most samples a second are read (0, 1, 2, 4 were tried)"),
        (0, 0, "with 0 workers the most samples a second are read (0, 1, 2, 4 were tried)"),
    ],
)
def test_the_knee_is_said_beside_the_fastest_which_it_may_be(at, best, said):
    assert processes.compared(at, best, {0: 100.0, 1: 94.0, 2: 190.0, 4: 200.0}) == said
    assert counts(2) == [0, 1, 2, 4]
    assert counts(1) == [0, 1, 2]


def test_an_epoch_reads_each_sample_once():
    import torch

    given = requests(torch.arange(BATCH * BATCHES).numpy())
    assert [index for request in given for index in request.indices.tolist()] == list(range(len(Crafted())))


def test_the_experiment_measures_all_ways(zygotes, monkeypatch):
    monkeypatch.setattr(processes, "counts", lambda processors: [0, 1])
    bench = Bench("processes", ("cpu",), {"elements": (2, 4), "elements_each": (2,)}, SMALL, cpu_ranks=1)
    figures = experiments()["processes"].run(bench)
    assert not any(reading.left for reading in bench.readings)
    found = {
        (figure.name, *figure.parameters.values()) for figure in figures if "marks" not in figure.parameters
    }
    for kind in TASKS:
        assert {each for each in found if each[0] == processes.title(kind)} == {
            (processes.title(kind), SERIAL, 2), (processes.title(kind), SERIAL, 4), (processes.title(kind), POOL, 2),
            (processes.title(kind), POOL, 4), (processes.title(kind), EACH, 2),
        }  # fmt: skip
    assert {each[1] for each in found if each[0] == processes.START} == {"one process", "a pool of 2"}
    assert {each[1] for each in found if each[0] == processes.LOADER} == {0, 1}
    (mark,) = [figure for figure in figures if figure.parameters.get("marks") == processes.LOADER]
    assert (mark.value in (0, 1), mark.notes) == (True, ("knee",))
