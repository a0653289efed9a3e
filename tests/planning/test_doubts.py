"""What makes a plan doubtful: moments at which others were at work, and speed-ups that cannot be."""

from unittest.mock import ANY

import pytest
from tests.planning.pricers import found, line
from tests.planning.records import planned
from tests.workloads import workload

from kway.planning.doubts import doubtful, impossible, of_measurements, of_profile, said
from kway.planning.price import Price


def busy_when_alone(times):
    """Price one device as though it had been timed at a busy moment: ``times`` as long."""

    def price(candidate, batch):
        cost = line()(candidate, batch)
        return cost if candidate.devices > 1 else Price({"compute": times * cost.step_s}, cost.memory)

    return price


def test_a_speed_up_beyond_the_number_of_devices_is_said_to_be_impossible():
    rows = planned(found(256, busy_when_alone(20.0))).candidates
    (said,) = impossible(rows, given=())
    assert said.startswith(
        "data=2 on cpu:2 would be 37.2 times as fast as one device, which by what is known 2 "
    )
    assert (
        "a busy moment (kway plan --refresh, in Python refresh=True of kway.plan, finds it out anew)" in said
    )
    assert {row["devices"] for row in doubtful(rows)} == {2}
    (given,) = impossible(rows, given=["cpu"])
    assert "(profile it anew: kway profile)" in given


@pytest.mark.parametrize("times", [1.0, 1.1])
def test_a_speed_up_that_can_be_is_not(times):
    """1.86 times on two devices, and 2.05 times, which caches and spread may make."""
    rows = planned(found(256, busy_when_alone(times))).candidates
    assert (impossible(rows, given=()), doubtful(rows)) == ([], [])


@pytest.mark.parametrize(("times", "is_said"), [(1.0, False), (2.1, False), (3.0, True)])
def test_a_share_that_takes_longer_to_compute_than_the_whole_is_said_to_be_impossible(times, is_said):
    """Half of 256 samples take 12.8 of 25.6 ms, and as many times as long at a busy moment."""

    def price(candidate, batch):
        cost = line()(candidate, batch)
        slower = times if candidate.devices > 1 else 1.0
        return Price({**cost.terms, "compute": slower * cost.terms["compute"]}, cost.memory)

    # With a batch for each device, each of two has half of the threads that the one has.
    assert impossible(
        planned(found(128, price, strategies=["single", "data"], weak=True)).candidates, given=()
    ) == ([] if times < 2.2 else [ANY])
    rows = planned(found(256, price, strategies=["single", "data"])).candidates
    said_of_it = impossible(rows, given=())
    assert len(said_of_it) == len(doubtful(rows)) == is_said
    if is_said:
        assert said_of_it[0].startswith(
            "data=2 on cpu:2: each would compute 128 samples for 41.4 ms, and one device 256 samples for 26.6 ms, "
            "which cannot be: the times of one of 2 devices are probably of a busy moment (kway plan --refresh"
        )


def test_what_was_found_out_beside_others_is_named_with_its_moment():
    others, made = "1.8 of 2 processors", "2026-01-01T10:20:30+00:00"
    assert of_profile(workload(made=made), given=False) == []
    assert said([]) == []
    of_model = of_profile(workload(made=made, busy=others), given=False)
    (profile,) = said(of_model)
    assert profile.startswith(
        "the profile on cpu is of 2026-01-01 10:20 (UTC), when other programs kept 1.8 of 2 processors busy: "
    )
    entries = [
        {"name": "collectives", "made": made, "busy": others},
        {"name": "overlap", "made": "", "busy": ""},
        {"name": "beside", "made": made, "busy": others},
        {"name": "copies"},
    ]
    of_machine = of_measurements(entries, given=True)
    (line_of_both,) = said(of_machine)
    assert line_of_both.startswith("measurements (collectives, beside) are of 2026-01-01 10:20 (UTC), when")
    assert line_of_both.endswith("(measure anew: kway measure --refresh)")
    # One line for all of a plan.
    (whole,) = said([*of_model, *of_machine, *of_machine])
    assert whole.startswith(profile.partition(": predictions")[0])
    assert (
        "; measurements (collectives, beside) are of 2026-01-01 10:20 (UTC), when they kept 1.8 of 2" in whole
    )
    assert whole.count("predictions may be far") == whole.count("measurements (") == 1
