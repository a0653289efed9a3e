"""What users are told of tuning: which way a run takes, why, and what its measurements may cost."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import kway
from kway.tuning.knobs import Subject
from kway.tuning.run import Tuned, _Budget
from kway.tuning.search import Found, Reading
from kway.world import StopRequest

X, Y = torch.randn(64, 36, generator=torch.Generator().manual_seed(0)), torch.arange(64) % 3
FUSED = {"optimizer": "fused", "threads": 1}
MADE = "2026-11-29T10:00:00+00:00"


def job():
    sgd = partial(torch.optim.SGD, lr=0.05)
    return kway.Job(partial(nn.Linear, 36, 3), nn.CrossEntropyLoss(), sgd, (X, Y), batch_size=16)


def trained(**more):
    """Train, and return the run and the notices of it."""
    notices = []

    def hear(event, record):
        if event in ("notice", "warning"):
            notices.append(record["text"])

    more = {"devices": "cpu:1", "epochs": 1, "callbacks": [hear], **more}
    return kway.train(job(), **more), notices


@pytest.mark.parametrize(
    ("tuned", "said"),
    [
        (Tuned(FUSED, "remembered", made=MADE), "as measured on 2026-11-29 (--no-tune: as it is)"),
        (
            Tuned(FUSED, "remembered", made=MADE, busy="1.8 of 2 processors"),
            "on 2026-11-29 while other programs kept 1.8 of 2 processors busy (kway tune --refresh measures anew; ",
        ),
        (Tuned(FUSED, "measured", "", 3.0, MADE, Found(FUSED)), "as measured now, once only, in 3 s"),
        (Tuned(FUSED, "measured", "", 3.0, MADE, Found(FUSED, again=0.5)), "as measured now, twice, in 3 s"),
    ],
)
def test_a_run_says_what_was_chosen_for_it(monkeypatch, tuned, said):
    monkeypatch.setattr("kway.jobs.tuning.tune_on_ranks", lambda *given: tuned)
    run, notices = trained()
    assert run.record.settings == FUSED
    assert [line for line in notices if said in line] == [notices[0]]
    assert notices[0].startswith("optimizer fused, threads 1, ")


def test_a_run_says_that_nothing_faster_was_found_for_it(monkeypatch):
    monkeypatch.setattr("kway.jobs.tuning.tune_on_ranks", lambda *given: Tuned({}, "remembered", made=MADE))
    run, notices = trained()
    assert run.record.settings == {}
    assert notices[0].startswith("steps run as they are: on 2026-11-29 nothing was found that is faster")


@pytest.mark.parametrize(
    ("tuned", "when"),
    [
        (Tuned({}, "remembered", made=MADE, undecided=True), "on 2026-11-29"),
        (Tuned({}, "measured", "", 3.0, MADE, Found({}, undecided=True), undecided=True), "in 3 s"),
    ],
)
def test_a_run_says_that_nothing_was_decided_for_it(monkeypatch, tuned, when):
    monkeypatch.setattr("kway.jobs.tuning.tune_on_ranks", lambda *given: tuned)
    said = "it was not decided which way is fastest, since the machine changed meanwhile"
    assert trained()[1][0] == f"steps run as they are: {when} {said} (kway tune --refresh measures anew)"
    assert kway.tune(job(), devices="cpu:1").notices[0] == f"{said}: kway tune --refresh measures anew"


@pytest.mark.usefixtures("short")
def test_what_is_tuned_beside_busy_programs_says_so(monkeypatch):
    monkeypatch.setattr("kway.devices.busy.taken", lambda usable: "1.8 of 2 processors")
    said = []
    record = kway.tune(job(), devices="cpu:1", say=said.append)
    assert said[0].startswith("other programs keep 1.8 of 2 processors busy")
    assert record.notices[0].startswith("measured while other programs kept 1.8 of 2 processors busy")
    # What was kept is known to be of that moment, when the machine is quiet again.
    monkeypatch.setattr("kway.devices.busy.taken", lambda usable: "")
    assert kway.tune(job(), devices="cpu:1").notices[0] == record.notices[0]
    run, notices = trained()
    assert run.record.tuned["busy"] == record.busy == "1.8 of 2 processors"
    assert "while other programs kept 1.8 of 2 processors busy" in notices[0]
    assert kway.tune(job(), devices="cpu:1", refresh=True).busy == trained()[0].record.tuned["busy"] == ""


@pytest.mark.usefixtures("short")
def test_a_moment_that_becomes_busy_while_ways_are_measured_counts(monkeypatch):
    looks = iter(["", "1.8 of 2 processors"])
    monkeypatch.setattr("kway.devices.busy.taken", lambda usable: next(looks))
    assert kway.tune(job(), devices="cpu:1").busy == "1.8 of 2 processors"


class Views(nn.Linear):
    """Weight and bias are parts of one tensor."""

    def __init__(self):
        super().__init__(36, 3)
        whole = torch.randn(3, 37)
        self.weight, self.bias = nn.Parameter(whole[:, :36]), nn.Parameter(whole[:, 36])


class Tied(nn.Module):
    """One weight under two names."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer, self.last = nn.Linear(36, 36), nn.Linear(36, 36), nn.Linear(36, 3)
        self.outer.weight = self.inner.weight

    def forward(self, x):
        return self.last(self.outer(torch.tanh(self.inner(x))))


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize(("model", "how"), [(Views, "left"), (Tied, "measured")])
def test_views_of_one_storage_are_left_as_they_are_and_a_weight_under_two_names_is_tuned(model, how):
    record = kway.tune(replace(job(), model=model), devices="cpu:1", seconds=5)
    assert (record.how, "views of one storage" in record.why) == (how, model is Views)


@pytest.mark.parametrize(
    ("choice", "more", "said"),
    [
        (FUSED, {}, None),
        ({}, {"exactness": "bits"}, None),
        (FUSED, {"exactness": "bits"}, "only where it asks: --tune-seconds 9 (tune_seconds=)"),
        (FUSED, {"step_kind": "eager"}, "names --step-kind eager as well and asks: --tune-seconds 9"),
        (FUSED, {"allow": "bf16"}, "kept nowhere, since other precisions were allowed"),
        ({"precision": "bf16"}, {"allow": "bf16"}, "name --precision bf16 (precision='bf16') in runs"),
    ],
)
def test_a_tuning_says_which_runs_take_its_choice_up_where_not_all_do(monkeypatch, choice, more, said):
    tuned = Tuned(choice, "measured", "", 3.0, MADE, Found(choice))
    monkeypatch.setattr("kway.jobs.tuning.tune_on_ranks", lambda *given: tuned)
    record = kway.tune(job(), devices="cpu:1", seconds=9, **more)
    told = [line for line in record.notices if "kept" in line or "takes it up" in line]
    assert [said in line for line in told] == ([] if said is None else [True])


@pytest.mark.usefixtures("short")
def test_what_a_tuning_says_of_later_runs_is_so(monkeypatch):
    """Level bits, and a step kind that is named: a run finds the choice where it asks, and else runs as it is."""
    monkeypatch.setattr("kway.tuning.search.faster", lambda one, other: one.median_s != other.median_s)
    for more in ({"exactness": "bits"}, {"step_kind": "eager"}):
        chosen = kway.tune(job(), devices="cpu:1", seconds=30, **more).choice
        assert chosen
        asks, asks_not = (trained(**more, **given)[0].record for given in ({"tune_seconds": 30}, {}))
        assert (asks.tuned["how"], asks.tuned["choice"]) == ("remembered", chosen)
        assert (asks_not.tuned, asks_not.settings) == (None, {})


def test_a_run_that_was_to_be_tuned_and_is_not_says_why_and_others_say_nothing(monkeypatch):
    monkeypatch.setattr("kway.jobs.tuning.tune_on_ranks", lambda *given: Tuned({}, "left", "it is a stream"))
    assert trained(tune_seconds=5)[1] == ["not tuned: it is a stream"]
    assert trained()[1] == trained(tune=False)[1] == []


def test_a_run_that_goes_on_says_that_it_does_so_as_it_was_begun(tmp_path):
    trained(out=tmp_path / "run", checkpoint_every=1, settings=FUSED)
    on, notices = trained(epochs=2, resume=tmp_path / "run")
    assert any(line.startswith("optimizer fused, threads 1, as the run was begun") for line in notices)
    assert (on.record.tuned["how"], on.record.tuned["choice"]) == ("left", FUSED)
    again, notices = trained(epochs=2, resume=tmp_path / "run", settings=FUSED, tune=False)
    assert not any("as the run was begun" in line for line in notices)
    assert again.record.tuned is None


def budget(seconds, said):
    """A budget of which a compilation takes the 90 seconds that it took under load."""
    trials = SimpleNamespace(
        group=SimpleNamespace(objects=lambda value: [value]),
        trace_s=1.0,
        model=nn.Linear(2, 2),
        plan=SimpleNamespace(step_kind="eager"),
        measure=lambda choice: Reading((1.0,), 95.0, 90.0),
    )
    start = Reading((1.0,), 1.0)
    return _Budget(trials, Subject("cpu"), 0.0, start, seconds, StopRequest(), said.append)


def test_a_compilation_that_may_miss_its_estimate_says_so_before_and_by_how_much_after():
    said = []
    short = budget(60.0, said)
    short.measure({"optimizer": "fused"})
    assert said == []
    assert short.overrun(62.0) == ""
    assert short.overrun(70.0) == "measuring took 70 s: 10 s more than the 60 s there were"
    for _ in range(2):
        short.measure({"step_kind": "compiled"})
    assert len(said) == 1
    assert said[0].startswith("now compiling, for about 16 of the ")
    assert "180 of them compiling: 142 s more than the 60 s there were" in short.overrun(202.0)
