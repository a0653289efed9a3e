"""The step kind of a run with ``strategy="auto"``: the one that was priced with the layout, where none is named."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from tests.planning.machine import measurements
from tests.workloads import workload
from torch import nn

import kway
from kway.jobs import known_costs
from kway.jobs.asked import asked_of
from kway.jobs.tuning import in_the_way_chosen
from kway.records import Plan
from kway.strategies.levels import DEFAULT_SHARDS
from kway.training.spec import TrainSpec
from kway.training.wish import Wish
from kway.tuning.run import Tuned

SGD = partial(torch.optim.SGD, lr=0.1)
X, Y = torch.randn(64, 6, generator=torch.Generator().manual_seed(0)), torch.arange(64) % 3


def job():
    return kway.Job(partial(nn.Linear, 6, 3), nn.CrossEntropyLoss(), SGD, (X, Y), batch_size=64, name="net")


@pytest.fixture(autouse=True)
def remembered(two_cores, monkeypatch):
    """Compiled steps take half of what eager ones do, and talking takes longer than both."""
    monkeypatch.setattr("kway.jobs.place.rank_threads", lambda device_set: 1)
    eager, compiled = (
        workload((16, 32, 64), model="net", step_kind=kind, per_sample_s=seconds, threads=(1, 2))
        for kind, seconds in (("eager", 1e-4), ("compiled", 5e-5))
    )
    both = replace(eager, timings=[*eager.timings, *compiled.timings], fits=[*eager.fits, *compiled.fits])

    def gather(asked, *rest, **options):
        return known_costs.gather(asked, {"cpu": both}, measurements(latency_s=1.0), None, print)

    monkeypatch.setattr("kway.jobs.automatic.gather", gather)
    return both


@pytest.mark.parametrize("tune", [True, False])
def test_a_kind_that_is_known_to_be_faster_is_taken(tune):
    run = kway.train(job(), strategy="auto", devices="auto", epochs=3, tune=tune, echo=False)
    assert (run.record.step_kind, run.record.strategy) == ("compiled", "single")
    assert run.record.predicted_step_s == pytest.approx(1e-3 + 64 * 5e-5, rel=0.1)
    chosen = next(line for line in run.record.notices if line.startswith("auto: "))
    assert "compiled" in chosen
    assert "of 5 candidates" in chosen
    # Threads are there with eager steps: that they have no others is no news.
    assert not any(line.startswith("left out") for line in run.record.notices)


def test_one_device_takes_it_too(remembered):
    asked = asked_of(job(), "cpu:1", "auto", "math", DEFAULT_SHARDS, ["eager"])
    facts = known_costs._facts(asked, job(), ["cpu"])
    known_costs.write(known_costs._place(facts), facts, seconds=20.0, workload=remembered.to_dict())
    run = kway.train(job(), strategy="auto", devices="cpu:1", epochs=3, tune=False, echo=False)
    assert run.record.step_kind == "compiled"


@pytest.mark.parametrize("named", [{"step_kind": "eager"}, {"exactness": "bits"}])
def test_a_kind_that_is_named_or_a_part_of_the_bits_stays(named):
    assert kway.train(job(), strategy="auto", epochs=1, echo=False, **named).record.step_kind == "eager"


@pytest.mark.parametrize(
    ("tuned", "kind", "line"),
    [
        (Tuned({}, "left", "too short"), "graph", None),
        (Tuned({}, "remembered", "it does not pay", made="2026-01-01"), "graph", "steps run graph, as planned: it"),
        (Tuned({}, "measured", "", undecided=True), "graph", "steps run graph, as planned: in "),
        (Tuned({}, "remembered", "", made="2026-01-01"), "eager", "steps run as they are: on 2026-01-01"),
        (Tuned({"step_kind": "compiled"}, "measured", ""), "compiled", "step kind compiled, as measured"),
    ],
)  # fmt: skip
def test_what_was_measured_comes_before_what_was_planned(monkeypatch, tuned, kind, line):
    monkeypatch.setattr("kway.jobs.tuning.tune_on_ranks", lambda *given: tuned)
    context = SimpleNamespace(world=SimpleNamespace(is_main=True), emit=print, status=None, stop=None)
    spec = TrainSpec(
        job(),
        Plan("single", {}, ["cpu"], "math", ""),
        "",
        tune=Wish(None, None, (), True),
        planned_kind="graph",
    )
    found = in_the_way_chosen(context, spec, nn.Linear(6, 3))
    assert found.plan.step_kind == kind
    assert [text for text in found.told if line and line in text] == list(found.told)
