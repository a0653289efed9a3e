"""plan.json, and what is kept of checks."""

import copy

import pytest
from tests.planning.records import planned

from kway.devices.simulated import simulated
from kway.errors import UsageError
from kway.planned import Planned, spelled_set, titled
from kway.planning import history
from kway.planning.candidates import Candidate
from kway.planning.order import judged


def test_a_plan_comes_back_from_its_file(tmp_path):
    record = planned()
    path = record.save(tmp_path)
    assert path.name == "plan.json"
    assert Planned.load(path) == record
    assert record.best["strategy"] == "data=2"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda row: row.pop("terms"), r"candidates\[0\]: terms is missing"),
        (lambda row: row["terms"].update(compute=9.0), "the terms of candidate 0 are 9"),
        (
            lambda row: row["terms"].update(compute=-1.0),
            r"candidates\[0\].terms: compute is -1.0, not a number of at least 0",
        ),
        (lambda row: row.update(fits=1), r"candidates\[0\]: fits is 1, not true or false"),
        (lambda row: row.update(devices=3), "has 3 devices and names 2"),
    ],
)
def test_a_plan_that_does_not_hold_together_is_refused(change, said):
    rows = copy.deepcopy(planned().candidates)
    change(rows[0])
    with pytest.raises(UsageError, match=said):
        planned(candidates=rows)


@pytest.mark.parametrize("chosen", [3, -1, "x"])
def test_what_was_chosen_must_be_there(chosen):
    with pytest.raises(UsageError, match=f"there is no candidate 3|chosen is {chosen!r}, not a whole number"):
        planned(chosen=chosen)


def test_device_sets_are_written_as_users_name_them():
    assert [spelled_set(each) for each in (["cpu"], ["cpu"] * 3, ["cuda:0", "cuda:2"])] == [
        "cpu:1", "cpu:3", "cuda:0,2",
    ]  # fmt: skip
    row = {"device_set": ["cpu"] * 2, "devices": 2, "strategy": "data=2", "step_kind": "compiled"}
    assert titled(row) == "data=2 on cpu:2, compiled"


def test_errors_are_kept_by_machine_and_the_oldest_go(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    here, there = history.facts_of(simulated(cores=2)), history.facts_of(simulated(gpus=1))
    assert history.summary(history.recall(here)) == {"checks": 0, "mean_error": None}
    history.keep(here, [{"error": -0.1}, {"error": 0.3}])
    assert history.summary(history.recall(here)) == {"checks": 2, "mean_error": pytest.approx(0.2)}
    assert history.recall(there) == []
    history.keep(here, [{"error": 0.0}] * history.MOST)
    assert history.summary(history.recall(here)) == {"checks": history.MOST, "mean_error": 0.0}


def checked(error, strategy="data=2", devices=2, kind="eager", model="net"):
    return {
        "error": error, "strategy": strategy, "device_set": ["cpu"] * devices, "step_kind": kind, "model": model,
    }  # fmt: skip


def test_what_is_too_close_to_tell_follows_the_checks_of_the_same_candidates():
    these = [Candidate({}, ("cpu",), "eager", 1), Candidate({"data": 2}, ("cpu", "cpu"), "eager", 1)]
    assert history.too_close([], these, "net") == {"part": 0.03, "checks": 0, "mean_error": None}
    others = [
        checked(0.5, "threads=2"), checked(0.5, "data=3", 3), checked(0.5, kind="compiled"), {"error": 0.5},
    ]  # fmt: skip
    assert history.too_close(others, these, "net")["part"] == 0.03
    own = [*others, checked(-0.1), checked(0.2, "single", 1)]
    assert history.too_close(own, these, "net") == {
        "part": pytest.approx(0.15), "checks": 2, "mean_error": pytest.approx(0.15),
    }  # fmt: skip
    # One run of a busy moment tells little of the order: candidates rest on the same times.
    busy = [checked(1.616)]
    assert history.too_close(busy, these, "net") == {
        "part": 0.5, "checks": 1, "mean_error": pytest.approx(1.616),
    }  # fmt: skip
    # Of other models where this one was never checked; of small errors none makes 3% less.
    assert history.too_close(own, these, "other")["part"] == pytest.approx(0.15)
    assert history.too_close([*own, checked(0.01, model="other")], these, "other")["part"] == 0.03


def test_a_file_of_checks_that_is_broken_counts_for_nothing(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    here = history.facts_of(simulated())
    history.keep(here, [{"error": 0.1}])
    file = next((tmp_path / "kway" / "planned").glob("*.json"))
    file.write_text(file.read_text().replace("0.1", '"x"'))
    assert history.recall(here) == []


def test_the_order_counts_where_candidates_are_a_tenth_apart():
    def row(step_s, measured, batch=100):
        return {
            "step_s": step_s,
            "measured_step_s": measured,
            "batch_size": batch,
            "error": step_s / measured - 1,
        }

    # 1.0 and 1.05 are too close to tell; against 2.0 both are right.
    found = judged([row(1.1, 1.0), row(1.0, 1.05), row(1.8, 2.0), {"batch_size": 1}])
    assert (found["candidates"], found["pairs"], found["right_order"]) == (3, 2, 2)
    wrong = judged([row(3.0, 1.0), row(1.0, 2.0)])
    assert (wrong["pairs"], wrong["right_order"], wrong["mean_error"]) == (1, 0, pytest.approx(1.25))
    # By the sample: the larger batch takes longer and is faster.
    assert judged([row(1.0, 1.0), row(1.5, 1.5, batch=200)])["right_order"] == 1
