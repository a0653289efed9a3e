"""What makes a plan doubtful: moments at which others were at work, and speed-ups that cannot be."""

import pytest
from tests.planning.pricers import found, line
from tests.planning.records import planned
from tests.workloads import workload

from kway.planning.doubts import impossible, of_measurements, of_profile, said
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
    (given,) = impossible(rows, given=["cpu"])
    assert "(profile it anew: kway profile)" in given


@pytest.mark.parametrize("times", [1.0, 1.1])
def test_a_speed_up_that_can_be_is_not(times):
    """1.86 times on two devices, and 2.05 times, which caches and spread may make."""
    assert impossible(planned(found(256, busy_when_alone(times))).candidates, given=()) == []


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
