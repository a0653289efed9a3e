"""A kept choice that has to be compiled, and runs that are too short for that."""

import json
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import kway
from kway.tuning.kept import Kept
from kway.tuning.run import _compiling
from kway.tuning.search import Found, Reading, Row


def job():
    return kway.Job(
        partial(nn.Linear, 4, 3),
        nn.CrossEntropyLoss(),
        partial(torch.optim.SGD, lr=0.1),
        data=(torch.randn(64, 4, generator=torch.Generator().manual_seed(0)), torch.arange(64) % 3),
        batch_size=16,
    )


@pytest.mark.usefixtures("short")
def test_a_run_that_is_too_short_for_compiling_runs_as_it_is_and_says_so(tmp_path):
    kway.tune(job(), devices="cpu:1", seconds=20)
    file = next((tmp_path / "cache/kway/tuned").iterdir())
    # Eight steps win 0.16 s.
    held = {**json.loads(file.read_text()), "choice": {"step_kind": "compiled"}, "gain_s": 0.02}
    file.write_text(json.dumps({**held, "compiling_s": 14.0}))
    said = []

    def show(event, record):
        said.extend([record["text"]] if event == "notice" else [])

    short = kway.train(job(), devices="cpu:1", epochs=2, echo=False, callbacks=[show]).record
    assert (short.step_kind, short.settings, short.tuned["how"]) == ("eager", {}, "remembered")
    why = f"compiling took 14 s on {held['made'][:10]}, and 8 steps would win 0.2 s"
    assert short.tuned["why"] == why
    assert said == [f"steps run as they are: {why} (--step-kind compiled: all the same)"]
    # What was chosen stays so for who asks, and for longer runs.
    assert kway.tune(job(), devices="cpu:1").choice == {"step_kind": "compiled"}


@pytest.mark.parametrize(("steps", "repaid"), [(699, False), (700, True)])
def test_compiling_is_repaid_by_steps_that_win_as_much(steps, repaid):
    assert Kept({"step_kind": "compiled"}, "", 14.0, 0.02).repays(steps) == repaid
    assert Kept({"optimizer": "fused"}, "").repays(0)


def test_what_compiling_took_is_that_of_the_first_with_the_same_kernels():
    start, plan = Reading((0.04,)), SimpleNamespace(step_kind="eager")
    compiled, fused = {"step_kind": "compiled"}, {"step_kind": "compiled", "optimizer": "fused"}
    rows = [
        Row("", {}, start, ""),
        Row("", compiled, Reading((0.03,), 15.0, 14.0), ""),
        Row("", fused, Reading((0.02,), 4.0, 3.0), ""),
        Row("", {**fused, "memory_format": "channels_last"}, Reading((0.03,), 31.0, 30.0), ""),
    ]
    assert _compiling(Found(fused, rows), start, plan) == (14.0, pytest.approx(0.02))
    assert _compiling(Found({"optimizer": "fused"}, rows), start, plan) == (0.0, 0.0)
    assert _compiling(Found(fused, rows), start, SimpleNamespace(step_kind="compiled")) == (0.0, 0.0)


@pytest.mark.usefixtures("short")
def test_a_long_run_measures_what_a_short_one_had_no_time_for(monkeypatch):
    monkeypatch.setattr("kway.tuning.run._Budget.cost", lambda self, choice: 5.0)
    assert any(row["step_s"] is None for row in kway.tune(job(), devices="cpu:1", seconds=4).rows)
    monkeypatch.setattr("kway.tuning.run.LEAST_STEPS", 8)
    run = partial(kway.train, job(), devices="cpu:1", epochs=2)
    # A twentieth of eight steps is no more than 4 s.
    assert run().record.tuned["how"] == "remembered"
    monkeypatch.setattr("kway.tuning.run.PART", 1e9)
    assert run(epochs=1).record.tuned["how"] == "remembered"
    assert run().record.tuned["how"] == "measured"
    # A minute is the most that a run takes unasked: what lacks more than that stays as it is.
    assert run().record.tuned["how"] == "remembered"


@pytest.mark.usefixtures("short")
def test_what_was_not_decided_is_said_to_later_runs_and_measured_anew_for_who_asks(tmp_path):
    kway.tune(job(), devices="cpu:1", seconds=20)
    file = next((tmp_path / "cache/kway/tuned").iterdir())
    file.write_text(json.dumps({**json.loads(file.read_text()), "choice": {}, "undecided": True}))
    said = []
    kway.train(
        job(), devices="cpu:1", epochs=1, callbacks=[lambda event, record: said.append(record.get("text"))]
    )
    assert any("it was not decided which way is fastest" in text for text in said if text)
    assert kway.tune(job(), devices="cpu:1").how == "measured"
