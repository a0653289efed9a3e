"""What is said of prices beyond all that was timed."""

import pytest
from tests.planning.machine import measurements
from tests.planning.records import planned
from tests.workloads import workload

from kway.planning.beyond import beyond
from kway.planning.candidates import Candidate
from kway.planning.priced import pricer
from kway.report.plans import lines_of


def candidate(devices, threads=1):
    return Candidate({"data": devices} if devices > 1 else {}, ("cpu",) * devices, "eager", threads)


def known(**more):
    """Return a workload of one device alone, and of one of two."""
    alone, of_two = workload((32, 64), **more), workload((16, 32), devices=2, **more)
    return workload((32, 64), timings=[*alone.timings, *of_two.timings], fits=[*alone.fits, *of_two.fits])


@pytest.mark.parametrize(
    ("devices", "samples", "said"),
    [
        (1, 64, []),
        (2, 20, []),
        (1, 65, ["shares of 32 to 64 samples were timed, and this one has 65"]),
        (2, 64, ["shares of 16 to 32 samples were timed, and this one has 64"]),
        (2, 8, ["shares of 16 to 32 samples"]),
        (4, 16, ["was timed for 2 at most, not for 4"]),
        (4, 64, ["was timed for 2 at most, not for 4", "shares of 16 to 32 samples"]),
    ],
)
def test_a_line_says_what_is_extrapolated(devices, samples, said):
    found = beyond(known(), candidate(devices), samples)
    assert len(found) == len(said)
    assert all(text.startswith("extrapolated: ") for text in found)
    assert all(part in text for part, text in zip(said, found, strict=True))


def test_the_shares_are_those_with_the_threads_that_a_rank_has():
    both = [*workload((32, 64), devices=2, threads=(2,)).timings, *workload((8, 16), devices=4).timings]
    made = workload((32, 64), timings=both, fits=[])
    assert beyond(made, candidate(2, threads=2), 64) == []
    assert "shares of 8 to 16 samples" in beyond(made, candidate(4), 64)[0]


def test_where_no_device_was_one_of_several_the_price_says_so_itself():
    assert beyond(workload((32, 64)), candidate(4), 32) == []


def test_a_plan_shows_which_candidates_it_is_of():
    price = pricer({"cpu": known()}, {"cpu": measurements()}, 8)
    assert price(candidate(2), 64).notes == ()
    (note,) = price(candidate(2), 128).notes
    record = planned()
    for row in record.candidates[:2]:
        row["notes"] = [note]
    lines = lines_of(record)
    assert f"  !  1, 2: {note}" in lines
    assert not any(line.startswith("  !") for line in lines_of(planned()))
