"""Recorded steps of real runs: figures that add up, one trace of all ranks, and a run that is the same."""

import gzip
import json
import time
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import kway
from kway.errors import UsageError
from kway.records import Training
from kway.report.timeline import PARTS
from kway.training.timeline import WARM_UP

G = torch.Generator().manual_seed(0)
X, Y = torch.randn(96, 8, generator=G), torch.arange(96) % 4
SLOW_S = 0.001


class Slow(Dataset):
    """Data that take ``seconds``: each sample of many, or the first of a few."""

    def __init__(self, seconds, samples=8):
        self.seconds, self.samples = seconds, samples

    def __len__(self):
        return self.samples

    def __getitem__(self, place):
        if self.samples > 8 or place == 0:
            time.sleep(self.seconds)
        return X[place], Y[place]


def net():
    return nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))


def job_of(data=(X, Y), **more):
    loss, sgd = nn.CrossEntropyLoss(), partial(torch.optim.SGD, lr=0.1)
    return kway.Job(model=net, loss=loss, optimizer=sgd, data=data, batch_size=8, workers=0, **more)


def train(ranks, job, size=2, **more):
    return kway.train(job, devices=f"cpu:{size}", ranks=ranks, echo=False, **{"epochs": 1, **more})


def read(folder):
    return json.loads(gzip.decompress((folder / "timeline.json.gz").read_bytes()))["traceEvents"]


def check_sums(timeline, size):
    assert [row["rank"] for row in timeline["ranks"]] == list(range(size))
    for row in timeline["ranks"]:
        assert sum(row[part] for part in PARTS) == pytest.approx(row["step_s"], rel=0.03)
        assert row["compute_s"] > 0
        assert row["idle_s"] >= 0


def test_two_ranks_leave_one_trace_and_parts_that_add_up(ranks, tmp_path):
    job = job_of(Slow(SLOW_S, 96))
    run = train(ranks, job, timeline=True, out=tmp_path / "run")
    timeline = Training.load(tmp_path / "run").timeline
    assert timeline == run.record.timeline
    assert timeline["steps"] == [*range(WARM_UP + 1, WARM_UP + 6)]
    assert timeline["within_s"] == 0
    check_sums(timeline, 2)
    for row in timeline["ranks"]:
        # A rank has four samples of each batch.
        assert row["input_wait_s"] > 3.9 * SLOW_S
        assert row["exposed_communication_s"] > 0
    events = read(tmp_path / "run")
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {0: "rank 0 (cpu)", 1: "rank 1 (cpu)"}
    for rank in (0, 1):
        own = [event for event in events if event["pid"] == rank and event["ph"] == "X"]
        at = {event["name"]: event for event in own if event["cat"] == "kway"}
        assert {f"step {number}" for number in timeline["steps"]} <= set(at)
        inside = [event for event in own if event["cat"] == "cpu_op"]
        # On the trace's clock the optimizer of a step lies within what kway knows of the step.
        steps = [event for event in own if event["name"].startswith("Optimizer.step#SGD")]
        assert len(steps) == 5
        for step, number in zip(steps, timeline["steps"], strict=True):
            around = at[f"step {number}"]
            assert around["ts"] <= step["ts"]
            assert step["ts"] + step["dur"] <= around["ts"] + around["dur"]
        assert len(inside) > 5 * 10


def test_what_comes_between_steps_is_left_out(ranks, tmp_path):
    run = train(
        ranks,
        job_of(validation=Slow(1.0)),
        steps=10,
        validate_every="8steps",
        checkpoint_every="3steps",
        timeline=4,
        out=tmp_path / "run",
    )
    timeline = run.record.timeline
    assert timeline["steps"] == [7, 8, 9, 10]
    check_sums(timeline, 2)
    assert all(row["step_s"] < 0.25 for row in timeline["ranks"])
    assert run.record.checkpoints["saved"] > 0
    assert run.record.measured_step_s is None


def test_what_is_recorded_is_not_changed_by_it(ranks):
    plain, recorded = (train(ranks, job_of(), timeline=steps).record for steps in (None, 5))
    assert recorded.weights_sha256 == plain.weights_sha256
    assert recorded.epochs[0]["train_loss"] == plain.epochs[0]["train_loss"]
    assert plain.timeline is None


def test_a_run_alone_has_nobody_to_wait_for_and_needs_no_folder():
    record = train(None, job_of(), size=1, timeline=3).record
    check_sums(record.timeline, 1)
    assert record.timeline["file"] is None
    assert record.timeline["ranks"][0]["exposed_communication_s"] == 0


class Breaks(nn.Linear):
    """A model whose ninth step, which is recorded, fails."""

    def forward(self, x):
        self.calls = getattr(self, "calls", 0) + 1
        if self.calls == 9:
            raise OverflowError("the ninth")
        return super().forward(x)


def test_a_run_that_fails_leaves_no_profiler_behind(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(OverflowError, match="the ninth"):
        kway.train(replace(job_of(), model=partial(Breaks, 8, 4)), devices="cpu:1", epochs=1, timeline=3)
    assert not list(tmp_path.glob("kway-timeline-*"))
    with torch.profiler.profile() as own:
        torch.ones(3).sum()
    assert any(event.name == "aten::sum" for event in own.events())


def test_steps_of_several_epochs_and_a_run_that_ends_before(ranks):
    record = train(ranks, job_of((X[:24], Y[:24])), epochs=4, timeline=5).record
    assert record.timeline["steps"] == [7, 8, 9, 10, 11]
    job = job_of((X[:24], Y[:24]), validation=(X[:8], Y[:8]))
    short = train(ranks, job, epochs=9, early_stop="validation_loss", patience=9, timeline=21)
    assert short.record.timeline["steps"] == [*range(7, 28)]


@pytest.mark.parametrize("value", [0, -1, 2.5, "5"])
def test_a_number_of_steps_is_meant(value):
    with pytest.raises(UsageError, match="at least 1, or True"):
        kway.train(job_of(), devices="cpu:1", timeline=value)


@pytest.mark.parametrize("more", [{"steps": 10}, {"epochs": 1}])
def test_a_run_must_be_long_enough(more, tmp_path):
    with pytest.raises(UsageError, match=r"timeline=7 in a run of 1\d steps"):
        kway.train(job_of(), devices="cpu:1", timeline=7, out=tmp_path / "run", **more)
    assert not (tmp_path / "run").exists()
