"""What a plan that is made on the way leaves of the user's data: all of it. The run is that without a plan."""

import re
import threading
from dataclasses import replace
from datetime import timedelta
from functools import partial

import pytest
import torch
from tests.planning.machine import measurements
from tests.workloads import workload
from torch import nn
from torch.utils.data import Dataset, IterableDataset

import kway
from kway.devices.simulated import simulated
from kway.jobs import checking
from kway.jobs.asked import asked_of
from kway.jobs.automatic import Going, automatic
from kway.jobs.threads import needing_processes

X, Y = torch.randn(64, 8, generator=torch.Generator().manual_seed(0)), torch.arange(64) % 4


class Draws(Dataset):
    """Draws from a generator of its own, and adds how often it was asked."""

    def __init__(self):
        self.generator, self.asked = torch.Generator().manual_seed(1), 0

    def __len__(self):
        return 64

    def __getitem__(self, place):
        self.asked += 1
        return X[place] + torch.rand(8, generator=self.generator) + self.asked / 64, Y[place]


class Once(IterableDataset):
    """Can be read once."""

    def __init__(self):
        self.items = iter([(X[place], Y[place]) for place in range(64)])

    def __iter__(self):
        return self.items


def net():
    return nn.Sequential(nn.Linear(8, 6), nn.Dropout(0.2), nn.Linear(6, 4))


def job(data):
    return kway.Job(net, nn.CrossEntropyLoss(), partial(torch.optim.SGD, lr=0.1), data, batch_size=16)


@pytest.fixture(autouse=True)
def one_core(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("kway.jobs.asked.discover", lambda: simulated(cores=1))
    monkeypatch.setattr("kway.jobs.automatic.MOST_S", 0.3)


@pytest.mark.parametrize("data", [Draws, Once])
def test_a_run_that_was_planned_on_the_way_is_that_with_its_strategy_named(monkeypatch, data):
    monkeypatch.setattr("kway.jobs.automatic.discover", lambda: simulated(cores=2))
    # Ranks that talk for ten seconds: one device is chosen.
    monkeypatch.setattr("kway.jobs.known_costs.measure", lambda **_: measurements((2,), 10.0, 1.0))
    planned = kway.train(job(data()), strategy="auto", steps=4)
    assert planned.record.devices == 1
    # It was: nothing was known of the model before.
    assert planned.record.predicted_step_s is not None
    named = kway.train(job(data()), devices="cpu:1", strategy="single", steps=4)
    assert planned.record.weights_sha256 == named.record.weights_sha256


def test_runs_of_a_check_read_data_of_their_own(monkeypatch):
    monkeypatch.setattr(checking, "RUN_S", 0.0)
    monkeypatch.setattr(checking, "LEAST_WINDOWS", 1)
    own, stream = Draws(), Once()
    known = workload((4, 8, 16), model="net")
    for data in (own, stream):
        record = kway.plan(
            job(data), devices="cpu:1", check=True, workload=known, measurements=measurements()
        )
        if data is own:
            assert len(record.best["rounds"]) == checking.ROUNDS
    assert own.asked == 0
    assert len([*stream]) == 64


class FromFile(Dataset):
    """Reads its samples from a file that is open, one thread at a time."""

    def __init__(self, path):
        path.write_bytes(X.numpy().tobytes())
        self.file, self.lock = path.open("rb"), threading.Lock()

    def __len__(self):
        return 64

    def __getitem__(self, place):
        with self.lock:
            self.file.seek(32 * place)
            return torch.frombuffer(bytearray(self.file.read(32)), dtype=torch.float32), Y[place]


@pytest.fixture
def from_file(tmp_path):
    data = FromFile(tmp_path / "rows")
    yield data
    data.file.close()


NOT_SENT = r"job\.data\.\w+: a '_\S+' cannot be sent to other processes"


def test_what_cannot_be_sent_is_planned_for_one_process(from_file):
    known = workload((4, 8, 16), model="net")
    record = kway.plan(job(from_file), devices="cpu:1 cpu:2", workload=known, measurements=measurements())
    assert {row["strategy"] for row in record.candidates} == {"single", "threads=2"}
    left = {row["strategy"]: row["why"] for row in record.left if row["device_set"] == ["cpu"] * 2}
    assert re.match(NOT_SENT, left["data=2"])
    assert "make it where it is used" in left["data=2"]
    with pytest.raises(kway.UsageError, match=f"^no plan for net: {NOT_SENT}"):
        kway.plan(
            job(from_file), devices="cpu:2", strategy="data", workload=known, measurements=measurements()
        )


def test_what_cannot_be_sent_is_trained_as_was_planned(from_file):
    record = kway.plan(
        job(from_file),
        devices="cpu:1 cpu:2",
        workload=workload((4, 8, 16), model="net"),
        measurements=measurements(),
    )
    assert kway.train(job(from_file), plan=record, steps=2).record.layout == record.best["layout"]


def test_the_one_layout_that_is_left_runs_also_without_a_price(monkeypatch, from_file):
    known = workload((4, 8, 16), model="net")
    # As a quick look at a busy machine may leave it: without what threads hand each other.
    few = replace(measurements(), figures=[])
    monkeypatch.setattr("kway.jobs.known_costs.profile", lambda *_, **__: known)
    monkeypatch.setattr("kway.jobs.known_costs.measure", lambda **_: few)
    record = kway.train(job(from_file), devices="cpu:2", strategy="auto", steps=2, echo=False).record
    assert (record.strategy, record.predicted_step_s) == ("threads=2", None)
    said = "auto: threads=2 on cpu:2, the only candidate: nothing is profiled for it, and nothing predicted"
    assert record.notices[0] == said
    in_memory = job((X, Y))
    going = automatic(Going(in_memory, "cpu:2", "auto", "auto", "math", 4), None, print)
    assert going.strategy == "data=2"
    assert going.lines[0].startswith("auto: data=2 on cpu:2, of 2 layouts, not priced: ")
    # What threads lack is no candidate: the user has not named them. One that is left alone needs no price.
    needing = needing_processes("error", stall_timeout=timedelta(seconds=30), timeline=None, max_restarts=0)
    assert list(needing) == ["stall_timeout=30 s"]
    going = automatic(Going(in_memory, "cpu:2", "auto", "auto", "math", 4, needing=needing), None, print)
    assert going.lines[0].startswith("auto: data=2 on cpu:2, the only candidate: ")
    (left,) = [line for line in going.lines if line.startswith("left out: ")]
    assert left.startswith("left out: threads=2 on cpu:2, eager: stall_timeout=30 s: its ranks are threads")
    with pytest.raises(kway.UsageError, match=f"^no plan for net: {NOT_SENT}"):
        kway.train(job(from_file), devices="cpu:2", strategy="auto", steps=2, stall_timeout="30s", echo=False)
    # A plan is nothing but prices.
    with pytest.raises(kway.NotMeasuredError, match=r"^no plan for net: the time of"):
        kway.plan(job(from_file), devices="cpu:2", workload=known, measurements=few)


@pytest.mark.parametrize(
    ("option", "why"),
    [
        ({"on_oom": "adapt"}, "on_oom='adapt': its ranks are threads of this process"),
        ({"max_restarts": 1}, "max_restarts=1: its ranks are threads of this process"),
        ({"tune_seconds": 5.0}, "tune_seconds=5.0: its steps are eager"),
        ({"timeline": 2}, "timeline=2: torch has one profiler for a process"),
    ],
    ids=str,
)
def test_a_run_with_an_option_that_threads_lack_has_no_threads_among_its_candidates(option, why, from_file):
    needing = needing_processes(**{"on_oom": "error", **option})
    asked = asked_of(job((X, Y)), "cpu:2", "auto", "math", 4, "eager", needing=needing)
    found, left = asked.candidates(lambda device: ["eager"])
    assert [each.strategy for each in found] == ["data=2"]
    assert next(each.why for each in left if each.strategy == "threads=2").startswith(why)
    # Threads are all that is left to this data.
    with pytest.raises(kway.UsageError, match=f"^no plan for net: {NOT_SENT}"):
        kway.train(job(from_file), devices="cpu:2", strategy="auto", steps=2, echo=False, **option)


def test_where_others_start_the_ranks_all_candidates_are_there(from_file):
    arguments = job(from_file), "cpu:2", "data", "math", 4, "eager"
    with pytest.raises(kway.UsageError, match=NOT_SENT):
        asked_of(*arguments)
    assert asked_of(*arguments, is_here=False).sets == [["cpu"] * 2]


def test_tuning_refuses_what_cannot_be_sent_before_it_begins(from_file, tmp_path):
    with pytest.raises(kway.UsageError, match=f"^{NOT_SENT}"):
        kway.tune(job(from_file), devices="cpu:2", out=tmp_path / "tuned")
    assert not (tmp_path / "tuned").exists()
