"""A plan that rests on a busy moment says so as long as it rests on it."""

import json
from dataclasses import replace
from functools import partial

import pytest
import torch
from tests.planning.machine import measurements
from tests.workloads import workload
from torch import nn

import kway
from kway.devices.simulated import simulated
from kway.jobs import known_costs
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
def two_cores(monkeypatch, tmp_path):
    """A cache of its own, a machine of two cores, and short looks."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("kway.devices.cpu.usable_cores", lambda *root: 2)
    for place in ("kway.jobs.asked", "kway.jobs.automatic"):
        monkeypatch.setattr(f"{place}.discover", lambda: simulated(cores=2))
    monkeypatch.setattr(known_costs, "USUAL_S", 1.0)


def test_what_was_found_out_on_a_busy_machine_says_so_in_every_later_plan(monkeypatch, tmp_path):
    options = {"measurements": measurements(), "strategy": "single"}
    with monkeypatch.context() as moment:
        moment.setattr("kway.devices.busy.taken", lambda usable: "1.8 of 2 processors")
        first = kway.plan(job(), out=tmp_path, **options)
    (note,) = first.notices
    assert note.startswith("the profile on cpu is of ")
    assert "when other programs kept 1.8 of 2 processors busy" in note
    assert json.loads((tmp_path / "plan.json").read_text())["notices"] == [note]
    again = kway.plan(job(), **options)
    assert again.notices == [note]
    assert lines_of(again)[-1] == f"note       {note}"
    # A run that is planned on the way rests on the same.
    monkeypatch.setattr("kway.jobs.automatic.MOST_S", 1.0)
    monkeypatch.setattr(known_costs, "measure", lambda **options: measurements((2,), 10.0, 1.0))
    assert note in kway.train(job(), strategy="auto", epochs=1).record.notices
    assert kway.plan(job(), refresh=True, **options).notices == []


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
