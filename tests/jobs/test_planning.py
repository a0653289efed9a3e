"""``kway.plan``, plans that runs go by, and ``strategy="auto"``, on two CPU ranks."""

import json
import os
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from textwrap import dedent

import pytest
import torch
from tests.planning.machine import measurements
from tests.started import started
from tests.workloads import workload
from torch import nn

import kway
import kway.strategies
from kway.devices.simulated import simulated
from kway.errors import UsageError
from kway.jobs import checking, known_costs
from kway.planned import Planned
from kway.planning import history
from kway.report.plans import lines_of
from kway.units import seconds_text

G = torch.Generator().manual_seed(0)
X, Y = torch.randn(640, 1, 6, 6, generator=G), torch.arange(640) % 3
SGD = partial(torch.optim.SGD, lr=0.05)


def net():
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))


def job(model=net, **more):
    return kway.Job(model, nn.CrossEntropyLoss(), SGD, **{"data": (X, Y), "batch_size": 64, **more})


@pytest.fixture(autouse=True)
def short_checks(two_cores, monkeypatch):
    """One thread a rank, and short checks."""
    monkeypatch.setattr("kway.jobs.place.rank_threads", lambda device_set: 1)
    monkeypatch.setattr(checking, "RUN_S", 0.0)
    monkeypatch.setattr(checking, "LEAST_WINDOWS", 1)


def costs(fixed_s=1e-3, per_sample_s=1e-4, latency_s=1e-4):
    """Return what a plan rests on, as ``kway.plan`` takes it."""
    timed = workload((16, 32, 64), model="net", fixed_s=fixed_s, per_sample_s=per_sample_s, threads=(1, 2))
    return {"workload": timed, "measurements": measurements(latency_s=latency_s)}


def test_a_plan_ranks_every_layout_and_is_saved(tmp_path):
    record = kway.plan(job(), out=tmp_path / "plan", **costs())
    assert {(row["strategy"], row["devices"]) for row in record.candidates} == {
        ("single", 1), ("data=2", 2), ("threads=2", 2),
    }  # fmt: skip
    assert record.best["devices"] == 2
    data = next(row for row in record.candidates if row["strategy"] == "data=2")
    assert any("all-reduce" in name for name in data["terms"])
    assert sum(data["terms"].values()) == pytest.approx(data["step_s"])
    assert Planned.load(tmp_path / "plan") == record
    with pytest.raises(UsageError, match=r"already holds plan\.json"):
        kway.plan(job(), out=tmp_path / "plan", **costs())


def test_where_talking_costs_more_than_it_saves_one_device_is_chosen():
    record = kway.plan(job(), strategy="single,data", **costs(latency_s=0.05))
    assert record.best["devices"] == 1
    assert "times slower than one device (cpu:1): " in record.candidates[1]["reason"]
    assert record.candidates[1]["break_even"]["batch_size"] > 64


def test_weak_scaling_plans_a_batch_for_each_device():
    record = kway.plan(job(), batch_size_per_device=32, strategy="single,data", **costs())
    assert (record.scaling, record.batch_size) == ("weak", 32)
    assert sorted(row["batch_size"] for row in record.candidates) == [32, 64]


def test_an_axis_that_comes_as_a_file_is_planned_with_its_price(monkeypatch, tmp_path):
    (tmp_path / "halves.py").write_text(
        dedent('''
        """An axis that halves what each device computes."""

        from kway.strategies.base import Axis


        class Halves(Axis):
            name, order, splits_batch, levels = "halves", 50, False, frozenset({"math"})

            def sizes(self, devices):
                return [2]

            def refuses(self, job, model, size, level):
                return None

            def apply(self, part, group):
                raise NotImplementedError

            def price(self, estimate, size, devices):
                estimate.terms["compute"] /= size
                estimate.add("passing on (point to point)", 2e-4)


        AXIS = Halves()
        ''')
    )
    monkeypatch.setattr(kway.strategies, "__path__", [*kway.strategies.__path__, str(tmp_path)])
    try:
        record = kway.plan(job(), **costs())
    finally:
        sys.modules.pop("kway.strategies.halves", None)
    row = next(row for row in record.candidates if row["strategy"] == "halves=2")
    assert (row["layout"], row["terms"]["passing on (point to point)"]) == ({"halves": 2}, 2e-4)
    text = "\n".join(lines_of(record))
    assert "halves=2 on cpu:2: " in text
    assert "passing on (point to point)" in text


class Named(nn.Sequential):
    """Writes down which processes run it."""

    def forward(self, batch):
        with Path(os.environ["PIDS"]).open("a") as file:
            file.write(f"{os.getpid()}\n")
        return super().forward(batch)


def named():
    return Named(nn.Flatten(), nn.Linear(36, 3))


def test_planning_runs_the_model_in_one_process_and_starts_none_for_it(monkeypatch, tmp_path):
    monkeypatch.setenv("PIDS", str(tmp_path / "pids"))
    monkeypatch.setattr(known_costs, "USUAL_S", 1.0)
    with started() as processes:
        record = kway.plan(job(named), measurements=measurements())
    assert {row["devices"] for row in record.candidates} == {1, 2}
    assert set((tmp_path / "pids").read_text().split()) == {str(os.getpid())}
    assert processes == []


def test_what_was_profiled_is_remembered_until_the_model_is_another(monkeypatch):
    monkeypatch.setattr(known_costs, "USUAL_S", 1.0)
    said = []
    options = {"measurements": measurements(), "strategy": "single", "say": said.append}
    first = kway.plan(job(), **options)
    assert [text for text in said if "profiling" in text]
    said.clear()
    again = kway.plan(job(), **options)
    assert (said, again.candidates) == ([], first.candidates)
    kway.plan(job(batch_size=32), **options)
    assert [text for text in said if "profiling" in text]
    said.clear()
    kway.plan(job(), refresh=True, **options)
    assert [text for text in said if "profiling" in text]


def test_the_users_module_is_as_it_was(monkeypatch):
    monkeypatch.setattr(known_costs, "USUAL_S", 1.0)
    model = net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(3)
    record = kway.plan(job(model, name="net"), devices="cpu", check=True, measurements=measurements())
    assert record.best["measured_step_s"] > 0
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    drawn = torch.rand(1)
    torch.manual_seed(3)
    assert torch.equal(drawn, torch.rand(1))


def test_a_check_runs_each_candidate_and_its_errors_are_history(ranks):
    record = kway.plan(job(), check=True, ranks=ranks, **costs())
    assert all(len(row["rounds"]) == checking.ROUNDS for row in record.candidates)
    for row in record.candidates:
        assert row["error"] == pytest.approx(row["step_s"] / row["measured_step_s"] - 1)
    assert record.check["candidates"] == 3
    assert record.best["measured_step_s"] == min(row["measured_step_s"] for row in record.candidates)
    assert record.history["checks"] == 3
    assert record.history["mean_error"] == pytest.approx(record.check["mean_error"])
    later = kway.plan(job(), **costs())
    assert later.history == record.history
    assert "in 3 checks here" in "\n".join(lines_of(later))


@pytest.mark.parametrize(
    ("latency_s", "error", "part", "devices"),
    # Two devices are predicted to be 1.7 times as fast, or 1.3 times.
    [(1e-4, 0.9, 0.5, 2), (4e-4, 0.2, 0.2, 2), (4e-4, 0.4, 0.4, 1), (4e-4, 3.0, 0.5, 1)],
)
def test_a_plan_does_not_tell_apart_what_checks_here_were_off_by(latency_s, error, part, devices):
    first = kway.plan(job(), strategy="single,data", **costs(latency_s=latency_s))
    assert (first.best["devices"], first.too_close["part"]) == (2, 0.03)
    facts = history.facts_of(simulated(cores=2))
    history.keep(
        facts,
        [
            history.entry({**row, "measured_step_s": 1.0, "error": error}, "net", "now")
            for row in first.candidates
        ],
    )
    later = kway.plan(job(), strategy="single,data", **costs(latency_s=latency_s))
    assert (later.best["devices"], later.too_close["checks"]) == (devices, 2)
    assert later.too_close["part"] == pytest.approx(part)
    is_said = f"one device (cpu:1): within {100 * part:.3g}% of the fastest" in "\n".join(lines_of(later))
    assert is_said == (devices == 1)


def test_a_candidate_that_fails_its_check_says_so_and_the_others_count():
    class Breaks(nn.Linear):
        def forward(self, batch):
            if torch.is_grad_enabled() and len(batch) < 64:
                raise ValueError("too few")
            return super().forward(batch.flatten(1))

    record = kway.plan(
        job(partial(Breaks, 36, 3), name="net"), strategy="single,threads", check=True, **costs()
    )
    assert record.check["candidates"] == 1
    assert any(text.startswith("threads=2 on cpu:2 was not checked: ") for text in record.notices)


def test_a_run_goes_by_a_plan(tmp_path, ranks):
    record = kway.plan(job(), strategy="data", out=tmp_path / "plan", devices="cpu:2", **costs())
    run = kway.train(job(), plan=tmp_path / "plan" / "plan.json", epochs=2, ranks=ranks)
    assert (run.plan.strategy, run.record.devices) == ("data=2", 2)
    assert run.record.predicted_step_s == record.best["step_s"]
    assert any(line.startswith("as planned on") for line in run.record.notices)
    # The plan's batch where the job has none of its own.
    left_open = kway.train(job(batch_size=None), plan=record, epochs=1, ranks=ranks)
    assert left_open.record.batch_size == 64


@pytest.mark.parametrize(
    ("changed", "options", "said"),
    [
        ({"batch_size": 32}, {}, "a plan for batch size 64: the job has 32"),
        ({"precision": "bf16"}, {}, "a plan for precision fp32"),
        ({"name": "other"}, {}, "a plan for model net: the job has other"),
        ({}, {"devices": "cpu:2"}, "plan and devices="),
        ({}, {"strategy": "data"}, "plan and strategy="),
        ({}, {"exactness": "loose"}, "a plan for exactness math"),
    ],
)
def test_a_plan_of_another_run_is_refused(changed, options, said):
    record = kway.plan(job(), **costs())
    with pytest.raises(UsageError, match=said):
        kway.train(job(**changed), plan=record, **options)


def test_a_plan_never_lowers_the_level_that_is_asked_for(ranks):
    made = kway.plan(job(), **costs())
    loose = replace(made, level="loose")
    with pytest.raises(UsageError, match=r"a plan for exactness loose: .* asked for math"):
        kway.train(job(), plan=loose)
    assert kway.train(job(), plan=loose, exactness="loose", epochs=1, ranks=ranks).plan.exactness == "loose"
    bits = replace(made, level="bits", shards=4)
    assert kway.train(job(), plan=bits, epochs=1, ranks=ranks).plan.exactness == "bits"
    with pytest.raises(UsageError, match="a plan for 4 shards"):
        kway.train(job(), plan=bits, exactness="bits", shards=2)


def test_a_plan_for_a_machine_that_is_not_here_starts_no_run(tmp_path):
    path = kway.plan(job(), out=tmp_path, **costs()) and tmp_path / "plan.json"
    held = json.loads(path.read_text())
    path.write_text(json.dumps({**held, "estimate_only": True}))
    with pytest.raises(UsageError, match="a machine that is not here"):
        kway.train(job(), plan=path)


def test_auto_finds_out_what_it_needs_says_what_and_why_and_is_judged(monkeypatch):
    monkeypatch.setattr("kway.jobs.automatic.MOST_S", 1.0)
    monkeypatch.setattr(known_costs, "measure", lambda **options: measurements((2,), 10.0, 1.0))
    said = []
    options = {"callbacks": [lambda event, record: said.append((event, record.get("text")))], "epochs": 3}
    run = kway.train(job(), strategy="auto", **options)
    assert run.plan.device_set == ["cpu"]
    notes = [text for event, text in said if event == "notice"]
    assert notes[0] == (
        "auto: what is not known of net and of this machine is found out now, in about 1 s (longer where single steps "
        "take long)"
    )
    takes = seconds_text(known_costs.PROFILE_PART * 1.0 + known_costs.AROUND_S)
    assert notes[1] == f"profiling net on one device (cpu), about {takes}"
    lines = [text for text in run.record.notices if text.startswith(("auto: ", "why: "))]
    assert lines[0].startswith("auto: one device (cpu:1) of 3 candidates, ")
    assert lines[1].startswith("why: fastest: ")
    assert run.record.predicted_step_s > 0
    kept = history.recall(history.facts_of(simulated(cores=2)))
    assert [entry["strategy"] for entry in kept] == ["single"]
    # The second run plans from the cache.
    said.clear()
    again = kway.train(job(), strategy="auto", **options)
    assert not [text for _, text in said if text and text.startswith("profiling")]
    assert "in 1 check here" in next(text for text in again.record.notices if text.startswith("auto: "))


def test_auto_takes_two_ranks_where_they_pay(monkeypatch, ranks):
    monkeypatch.setattr("kway.jobs.automatic.gather", lambda asked, *rest, **options: known(asked))
    run = kway.train(job(), strategy="auto", step_kind="eager", epochs=1, ranks=ranks)
    assert run.record.devices == 2
    # Devices that are named are used.
    one = kway.train(job(), strategy="auto", devices="cpu:1", step_kind="eager", epochs=1)
    assert (one.record.devices, one.record.strategy) == (1, "single")


def test_auto_starts_at_once_where_one_layout_is_left_and_says_what_it_left_out(monkeypatch, ranks):
    monkeypatch.setattr("kway.jobs.automatic.gather", pytest.fail)
    run = kway.train(
        job(),
        strategy="auto",
        devices="cpu:2",
        step_kind="eager",
        epochs=1,
        steps=1,
        max_restarts=1,
        ranks=ranks,
    )
    notices = run.record.notices
    only = "auto: data=2 on cpu:2, the only candidate: nothing is profiled for it, and nothing predicted"
    assert only in notices
    assert (run.record.devices, run.record.predicted_step_s) == (2, None)
    (left,) = [text for text in notices if text.startswith("left out: ")]
    assert left.startswith("left out: threads=2 on cpu:2, eager: max_restarts=1: its ranks are threads")


def test_a_run_too_short_for_its_timeline_is_refused_before_it_is_planned(monkeypatch):
    monkeypatch.setattr("kway.jobs.automatic.gather", pytest.fail)
    with pytest.raises(UsageError, match=r"timeline=5 in a run of 3 steps"):
        kway.train(job(), strategy="auto", timeline=True, steps=3)


def known(asked):
    given = costs(per_sample_s=1e-2)
    return known_costs.gather(asked, {"cpu": given["workload"]}, given["measurements"], None, print)


def test_nobody_is_given_a_plan_unasked(monkeypatch):
    monkeypatch.setattr("kway.jobs.automatic.automatic", pytest.fail)
    run = kway.train(job(), epochs=1)
    assert (run.plan.device_set, run.record.predicted_step_s) == (["cpu"], None)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"devices": "cpu:0"}, "at least 1 is needed"),
        ({"strategy": "dat"}, "unknown strategy"),
        ({"strategy": 3}, "names in a list or by commas"),
        ({"step_kind": "fast"}, "unknown step kind"),
        ({"step_kind": "graph"}, "it needs a CUDA device"),
        ({"exactness": "exact"}, "unknown exactness"),
        ({"batch_size_per_device": 0}, "at least 1"),
        ({"check": 1}, "True or False"),
        ({"workload": 3}, "it must be a Workload, or the path of its file"),
        ({"workload": "no/such.json"}, "no file"),
        ({"measurements": measurements(ranks=())}, "not measured"),
    ],
)
def test_what_cannot_be_planned_is_one_error_before_anything_runs(monkeypatch, options, said):
    monkeypatch.setattr(known_costs, "profile", pytest.fail)
    given = {**costs(), **options}
    if "measurements" in options:
        given["strategy"] = "data=2"
    with pytest.raises(UsageError, match=said):
        kway.plan(job(), **given)


def test_a_model_that_fits_nowhere_says_what_is_missing(monkeypatch):
    small = simulated(cores=2, memory=20_000)
    monkeypatch.setattr("kway.jobs.asked.discover", lambda: small)
    with pytest.raises(UsageError, match=r"fits on none of \d candidates.* are missing.*what would help"):
        kway.plan(job(), **costs())


def test_cpu_ranks_that_can_never_win_beside_a_gpu_are_not_profiled(monkeypatch):
    """On a machine that has both, as far as it can be told here: a workload of the GPU is given."""
    monkeypatch.setattr("kway.jobs.asked.discover", lambda: simulated(gpus=1, cores=2))
    monkeypatch.setattr(known_costs, "profile", pytest.fail)
    monkeypatch.setattr(known_costs, "measure", pytest.fail)
    # A millisecond a step of 64 samples; two cores at 100 GFLOP/s each take five.
    gpu = workload(
        (32, 64),
        model="net",
        fixed_s=1e-3,
        per_sample_s=0.0,
        device="cuda:0",
        flop_per_sample=1e9 / 64,
        device_name="simulated GPU",
    )
    record = kway.plan(job(), workload=gpu, measurements=measurements())
    assert [row["device_set"] for row in record.candidates] == [["cuda:0"]]
    assert record.left[-1]["why"].startswith(
        "not profiled: at 100 GFLOP/s a core, which few reach, all cores take 5.0"
    )
    assert "CPU ranks: left out: not profiled" in "\n".join(lines_of(record))
