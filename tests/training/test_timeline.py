"""Recorded steps of real runs: figures that add up, one trace of all ranks, and a run that is the same."""

import errno
import gzip
import json
import pickle
import random
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import kway
from kway.comm.clocks import Offset
from kway.comm.group import Group
from kway.errors import UsageError
from kway.records import Training
from kway.report.timeline import PARTS
from kway.training.stretch import Stretch
from kway.training.timeline import WARM_UP, Timeline

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


def full(profiler, path):
    raise OSError(errno.ENOSPC, "No space left on device")


def cut(profiler, path):
    Path(path).write_text('{"traceEvents": [{"ph": ')


def nothing(profiler, path):
    """What torch does where it cannot write: it says so in a log."""


def empty(profiler, path):
    Path(path).write_text('{"traceEvents": []}')


@pytest.mark.parametrize(
    ("export", "said"),
    [
        (full, "No space left"),
        (cut, "JSONDecodeError"),
        (nothing, "No such file"),
        (empty, "none of 5 marks"),
    ],
)
def test_a_trace_that_cannot_be_read_costs_no_run(export, said, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", export)
    run = train(None, job_of(), size=1, timeline=3, out=tmp_path / "run")
    assert (run.folder / "weights.safetensors").exists()
    record = Training.load(run.folder)
    assert record.timeline is None
    assert not (run.folder / "timeline.json.gz").exists()
    (notice,) = (text for text in record.notices if "timeline" in text)
    assert notice.startswith("there is no timeline")
    assert "of rank 0" in notice
    assert said in notice


def test_a_trace_that_cannot_be_written_costs_no_run_either(monkeypatch, tmp_path):
    def refuse(path, content):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("kway.training.timeline.write_atomically", refuse)
    record = train(None, job_of(), size=1, timeline=3, out=tmp_path / "run").record
    check_sums(record.timeline, 1)
    assert record.timeline["file"] is None
    assert "the timeline could not be written: No space left on device" in record.notices


class Weighed(Group):
    """A group that knows how much was gathered on all ranks."""

    sent = 0

    def objects(self, value):
        self.sent += len(pickle.dumps(value))
        return super().objects(value)


def told(context, folder, lost, backend):
    """What this rank finds of a step whose trace is 50 kB of noise on each rank, and lost on some."""
    group = Weighed(context.world.rank, context.world.size)
    file = Path(folder) / f"{group.rank}.json"
    place = {"ph": "X", "pid": 1, "tid": 1}
    mark = {**place, "cat": "user_annotation", "name": "kway clock 0", "ts": 1e6, "dur": 0}
    noise = {"key": random.Random(group.rank).randbytes(25_000).hex()}
    work = {**place, "cat": "cpu_op", "name": "aten::mm", "ts": 1e6, "dur": 5e5, "args": noise}
    text = json.dumps({"traceEvents": [mark, work]})
    file.write_text(text[:99] if group.rank in lost else text)
    stretch = Stretch(1.0, 2.0, [(7, 1.0, 2.0)], marks={"kway clock 0": (1.0, 1.0)}, file=file)
    timeline = Timeline(group, [Offset()] * group.size, [stretch], False, f"rank {group.rank}")
    with patch("torch.distributed.get_backend", lambda handle: backend):
        found, notices = timeline.record(1, Path(folder))
    return found, notices, group.sent


# Ranks on GPUs get a group over hosts: here as if these were some.
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_traces_go_to_the_first_rank_alone(backend, ranks, tmp_path):
    for found, notices, sent in ranks.run(told, str(tmp_path), (), backend):
        assert notices == []
        assert found["file"] == "timeline.json.gz"
        assert [row["compute_s"] for row in found["ranks"]] == [0.5, 0.5]
        assert sent < 1000
    noise = {event["pid"]: event["args"]["key"] for event in read(tmp_path) if event["name"] == "aten::mm"}
    assert noise == {rank: random.Random(rank).randbytes(25_000).hex() for rank in (0, 1)}


@pytest.mark.parametrize("lost", [(0,), (1,), (0, 1)])
def test_all_ranks_know_whose_trace_is_lost(lost, ranks, tmp_path):
    (first, *first_said), (second, *second_said) = ranks.run(told, str(tmp_path), lost, "gloo")
    assert first is second is None
    assert first_said[0] == second_said[0]
    assert [rank for rank in (0, 1) if f"of rank {rank}" in first_said[0][0]] == [*lost]
    assert not (tmp_path / "timeline.json.gz").exists()


def unreachable(*arguments, **more):
    raise RuntimeError("no route")


def told_without_hosts(context, folder):
    with patch("torch.distributed.new_group", unreachable):
        return told(context, folder, (), "nccl")


def test_hosts_that_do_not_reach_each_other_cost_the_trace_alone(ranks, tmp_path):
    found, notices, _ = ranks.run(told_without_hosts, str(tmp_path))[0]
    assert found["file"] is None
    assert [row["compute_s"] for row in found["ranks"]] == [0.5, 0.5]
    assert len(notices) == 1
    assert "no route" in notices[0]


@pytest.mark.parametrize("value", [0, -1, 2.5, "5"])
def test_a_number_of_steps_is_meant(value):
    with pytest.raises(UsageError, match="at least 1, or True"):
        kway.train(job_of(), devices="cpu:1", timeline=value)


@pytest.mark.parametrize("more", [{"steps": 10}, {"epochs": 1}])
def test_a_run_must_be_long_enough(more, tmp_path):
    with pytest.raises(UsageError, match=r"timeline=7 in a run of 1\d steps"):
        kway.train(job_of(), devices="cpu:1", timeline=7, out=tmp_path / "run", **more)
    assert not (tmp_path / "run").exists()
