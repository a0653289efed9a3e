"""A plan that rests on a busy moment says so as long as it rests on it, and a run that met one says so, too."""

import json
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from tests.measured import entry
from tests.planning.machine import measurements
from tests.workloads import workload
from torch import nn

import kway
from kway.devices.busy import Moment
from kway.devices.simulated import simulated
from kway.devices.torch_facts import cache_folder
from kway.jobs import known_costs
from kway.jobs.automatic import KEPT, NOT_KEPT
from kway.jobs.slowed import beside_others, slowed
from kway.planning import history
from kway.report.plans import lines_of

G = torch.Generator().manual_seed(0)
X, Y = torch.randn(640, 36, generator=G), torch.arange(640) % 3


def net():
    return nn.Linear(36, 3)


def job():
    return kway.Job(
        net, nn.CrossEntropyLoss(), partial(torch.optim.SGD, lr=0.05), data=(X, Y), batch_size=64, name="net"
    )


@pytest.fixture(autouse=True)
def short_looks(two_cores, monkeypatch):
    monkeypatch.setattr(known_costs, "USUAL_S", 1.0)


def test_what_was_found_out_on_a_busy_machine_says_so_in_every_later_plan(monkeypatch, tmp_path):
    options = {"measurements": measurements(), "strategy": "single"}
    with monkeypatch.context() as moment:
        moment.setattr("kway.devices.busy.taken", lambda usable: "1.8 of 2 processors")
        first = kway.plan(job(), out=tmp_path, **options)
    (note,) = first.notices
    assert note.startswith("the profile on cpu is of ")
    assert "when other programs kept 1.8 of 2 processors busy" in note
    # Whoever repeats it may have no such flag: `kway train` has none.
    assert "(kway plan --refresh, in Python refresh=True of kway.plan, finds it out anew)" in note
    assert json.loads((tmp_path / "plan.json").read_text())["notices"] == [note]
    again = kway.plan(job(), **options)
    assert again.notices == [note]
    assert lines_of(again)[-1] == f"note       {note}"
    # A run that is planned on the way rests on the same.
    monkeypatch.setattr("kway.jobs.automatic.MOST_S", 1.0)
    monkeypatch.setattr(known_costs, "measure", lambda **options: measurements((2,), 10.0, 1.0))
    assert note in kway.train(job(), strategy="auto", epochs=1).record.notices
    assert kway.plan(job(), refresh=True, **options).notices == []


@pytest.mark.parametrize("others", ["1.8 of 2 processors", ""])
def test_what_rests_on_a_busy_moment_is_kept_for_no_later_plan(monkeypatch, others):
    """Of a run that was planned on the way as little as of a check; the run says which."""
    monkeypatch.setattr("kway.jobs.automatic.MOST_S", 1.0)
    monkeypatch.setattr("kway.jobs.checking.ROUNDS", 1)
    monkeypatch.setattr("kway.jobs.checking.RUN_S", 0.0)
    busier = replace(
        measurements((2,), 10.0, 1.0),
        experiments=[entry(name, busy=others) for name in ("collectives", "copies")],
    )
    monkeypatch.setattr(known_costs, "measure", lambda **options: busier)
    with monkeypatch.context() as moment:
        moment.setattr("kway.devices.busy.taken", lambda usable: others)
        plan = kway.plan(job())
    monkeypatch.setattr("kway.devices.busy.taken", lambda usable: "")
    assert [each["busy"] for each in (*plan.workloads, *plan.measurements)] == [others, others]
    run = kway.train(job(), strategy="auto", epochs=4)
    assert run.record.measured_step_s
    checks = history.recall(history.facts_of(simulated(cores=2)))
    assert len(checks) == (not others)
    assert (KEPT in run.record.notices, NOT_KEPT in run.record.notices) == (not others, bool(others))
    # By the plan itself, and of a check of it, the same.
    kway.train(job(), plan=plan, epochs=4)
    checked = kway.plan(job(), check=True, strategy="single")
    assert checked.history["checks"] == (0 if others else 3)
    assert any("later plans do not go by this check" in text for text in checked.notices) == bool(others)


def test_an_impossible_speed_up_is_noted():
    timed = workload((16, 32, 64), model="net", fixed_s=1e-3, per_sample_s=1e-4, threads=(1, 2))
    # What one device takes, which alone has two threads, at a moment when it had no processor of its own.
    timings = [
        {**each, "seconds": each["seconds"] * (50 if each["threads"] == 2 else 1)} for each in timed.timings
    ]
    record = kway.plan(
        job(), workload=replace(timed, timings=timings), measurements=measurements(latency_s=1e-4)
    )
    assert record.best["devices"] == 2
    (note,) = record.notices
    assert "2 devices cannot be: the time of one device is probably of a busy moment" in note


def test_a_check_says_who_else_was_at_work_and_what_is_new(monkeypatch):
    options = {"strategy": "single", "devices": "cpu:1"}
    monkeypatch.setattr("kway.jobs.checking.ROUNDS", 1)
    monkeypatch.setattr("kway.jobs.checking.RUN_S", 0.0)
    first = kway.plan(job(), **options)
    assert [each["new"] for each in first.workloads] == [True]
    (kept,) = (tmp for tmp in (cache_folder() / "profiled").glob("*.json"))
    held = json.loads(kept.read_text())
    held["workload"]["made"] = "2026-01-01T00:00:00+00:00"
    kept.write_text(json.dumps(held))
    monkeypatch.setattr("kway.devices.busy.taken", lambda usable: "1.8 of 2 processors")
    later = kway.plan(job(), check=True, **options)
    assert [each["new"] for each in later.workloads] == [False]
    (note,) = later.notices
    assert note.startswith("checked while other programs kept 1.8 of 2 processors busy")
    # Nor does any later plan go by what it was off by.
    assert later.history["checks"] == 0
    assert all(each["new"] for each in kway.plan(job(), refresh=True, **options).workloads)


def ended(step_s, device_set=("cpu",), threads=2, wall_s=9.0):
    return SimpleNamespace(
        measured_step_s=step_s,
        device_set=list(device_set),
        machine={"threads": threads} if threads else {},
        wall_s=wall_s,
    )


@pytest.mark.parametrize(
    ("step_s", "others", "said"),
    [
        (80e-3, "2.0 of 2 processors", True),
        (80e-3, "", False),
        (2.2e-3, "2.0 of 2 processors", False),  # off by less than a third
        (0.5e-3, "2.0 of 2 processors", False),  # faster than predicted: nobody slowed it
        (None, "2.0 of 2 processors", False),
    ],
)
def test_a_run_far_slower_than_predicted_names_who_else_is_at_work(monkeypatch, step_s, others, said):
    looks = []
    monkeypatch.setattr("kway.devices.busy.taken", lambda usable: looks.append(usable) or others)
    lines = slowed(ended(step_s), 1.8e-3)
    assert len(lines) == said
    # Nobody waits for a look where there is nothing to explain.
    assert len(looks) == (step_s == 80e-3)
    if said:
        assert lines[0].startswith(
            "steps took 80 ms, 1.8 ms were predicted: other programs keep 2.0 of 2 processors busy"
        )


@pytest.mark.parametrize(
    ("run", "environ", "helps"),
    [
        (ended(1.0), {}, True),
        (ended(1.0), {"OMP_WAIT_POLICY": "ACTIVE"}, True),
        (ended(1.0), {"OMP_WAIT_POLICY": "PASSIVE"}, False),
        (ended(1.0, threads=1), {}, False),
        (ended(1.0, threads=None), {}, False),
        (ended(1.0, ["cuda:0"]), {}, False),
    ],
)
def test_threads_that_spin_are_told_to_sleep(monkeypatch, run, environ, helps):
    monkeypatch.setattr("kway.devices.busy.taken", lambda usable: "2.0 of 2 processors")
    (line,) = slowed(run, 0.1, environ)
    assert ("OMP_WAIT_POLICY=passive" in line) == helps


def test_the_note_is_in_the_record_of_a_run_that_was_planned(monkeypatch, tmp_path):
    timed = workload((16, 32, 64), model="net", fixed_s=1e-6, per_sample_s=1e-9, threads=(1, 2))
    record = kway.plan(job(), devices="cpu:1", workload=timed, measurements=measurements())
    monkeypatch.setattr("kway.devices.busy.taken", lambda usable: "1.8 of 2 processors")
    run = kway.train(job(), plan=record, epochs=4, out=tmp_path / "run")
    assert run.record.measured_step_s > 2e-6
    (line,) = (line for line in run.record.notices if line.startswith("steps took "))
    assert line in json.loads((tmp_path / "run" / "train.json").read_text())["notices"]


IDLE, BUSY = (
    (Moment(0, 0, 2, 0.0), Moment(0, 2000, 2, 0.0)),
    (Moment(0, 0, 2, 0.0), Moment(2000, 2000, 2, 0.1)),
)


@pytest.mark.parametrize(
    ("run", "moments", "looks", "said"),
    [
        (ended(0.2), BUSY, 1, True),
        (ended(0.2, threads=1), BUSY, 1, True),
        (ended(0.2), IDLE, 0, False),
        (ended(0.2, wall_s=1.0), BUSY, 0, False),  # a look would be much beside it
        (ended(0.2, ["cuda:0"]), BUSY, 0, False),
        (ended(None), BUSY, 0, False),
        (ended(0.2), (None, None), 0, False),
    ],
)
def test_a_run_of_which_nothing_was_predicted_names_who_else_is_at_work(
    monkeypatch, run, moments, looks, said
):
    looked = []
    monkeypatch.setattr("kway.devices.busy.moment", lambda: moments[1])
    monkeypatch.setattr(
        "kway.devices.busy.taken", lambda usable: looked.append(usable) or "2.0 of 2 processors"
    )
    lines = beside_others(run, moments[0], {})
    assert (len(looked), len(lines)) == (looks, said)
    if said:
        assert lines[0].startswith("steps took 200 ms while other programs keep 2.0 of 2 processors busy")
        assert ("OMP_WAIT_POLICY=passive" in lines[0]) == (run.machine["threads"] > 1)


def test_who_else_was_at_work_is_in_the_record_of_a_plain_run(monkeypatch, tmp_path):
    # Far from where the counters were when the run began.
    monkeypatch.setattr("kway.devices.busy.moment", lambda: Moment(10**12, 10**12, 2, 0.0))
    monkeypatch.setattr("kway.jobs.slowed.LONG_S", 0.0)
    monkeypatch.setattr("kway.devices.busy.taken", lambda usable: "2.0 of 2 processors")
    run = kway.train(job(), devices="cpu:1", epochs=4, out=tmp_path / "run")
    (line,) = (line for line in run.record.notices if "other programs keep" in line)
    assert line in json.loads((tmp_path / "run" / "train.json").read_text())["notices"]
