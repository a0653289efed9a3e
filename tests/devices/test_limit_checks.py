import resource

import pytest

from kway.devices.limit_checks import locked_memory, open_files, tasks

NONE = resource.RLIM_INFINITY


def limits(soft, hard=NONE):
    return lambda number: (soft, hard)


@pytest.mark.parametrize(
    ("ranks", "soft", "hard", "outcome", "words"),
    [
        (2, 1024, NONE, "ok", "1,024 files"),
        (2, NONE, NONE, "ok", "any number of files"),
        (2, 256, 4096, "warn", "ulimit -n 1024"),
        (400, 1024, 4096, "fail", "400 ranks takes about 1240; ulimit -n 2480"),
        (2, 20, 64, "fail", "the hard limit of 64 must be raised"),
    ],
)
def test_open_files(ranks, soft, hard, outcome, words):
    found = open_files(ranks, limits(soft, hard))
    assert found.outcome == outcome
    assert words in f"{found.found}; {found.do}"
    assert bool(found.do) == (outcome != "ok")


@pytest.mark.parametrize(
    ("soft", "infiniband", "outcome"),
    [(NONE, True, "ok"), (8 << 20, False, "ok"), (8 << 20, True, "warn")],
)
def test_locked_memory_matters_to_infiniband_alone(soft, infiniband, outcome):
    found = locked_memory(infiniband, limits(soft))
    assert found.outcome == outcome
    assert ("memlock" in found.do) == (outcome == "warn")


@pytest.mark.parametrize(
    ("ranks", "soft", "group", "outcome", "words"),
    [
        (2, NONE, None, "ok", "no limit"),
        (2, 4096, None, "ok", "4,096 processes"),
        (2, 4096, 512, "warn", "--pids-limit"),
        (64, 4000, None, "warn", "64 ranks take 4096"),
        (2, 50, 512, "fail", "ulimit -u"),
    ],
)
def test_processes_and_threads(ranks, soft, group, outcome, words):
    found = tasks(ranks, group, limits(soft))
    assert found.outcome == outcome
    assert words in f"{found.found}; {found.do}"
