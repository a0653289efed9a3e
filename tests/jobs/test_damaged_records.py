"""Records of any form: whatever a file holds, a reader takes it or refuses it in words, field by field."""

import copy
import json
from contextlib import suppress
from dataclasses import replace
from functools import partial

import pytest
import torch
from tests.measured import (
    after_work,
    beside,
    copies,
    entry,
    figure,
    measurements,
    slowdown,
    sums,
    timed,
    turns,
    two_devices,
)  # fmt: skip
from tests.planning.records import planned
from tests.workloads import workload
from torch import nn

import kway
from kway.devices.simulated import simulated
from kway.elsewhere.description import Machine, described
from kway.elsewhere.machine import cluster_of, measurements_of
from kway.elsewhere.moving import moved
from kway.errors import UsageError, line_of
from kway.jobs.asked import asked_of
from kway.jobs.automatic import Going, by_plan
from kway.jobs.given import measurements_given, workloads_given
from kway.jobs.known_costs import Known
from kway.jobs.ranking import ranked
from kway.measurements import Measurements
from kway.planned import Planned
from kway.planning import doubts
from kway.planning.priced import pricer
from kway.proving.certificate import first_disagreement
from kway.records import Cluster, Plan, Proof, Training, Tuning
from kway.report import curves, lines, measured, plan_plots, plans, tuning
from kway.report import workload as layers
from kway.strategies.layout import AUTO
from kway.units import shown
from kway.workload import Workload

SGD = partial(torch.optim.SGD, lr=0.1)
JOB = kway.Job(
    lambda: nn.Linear(8, 3),
    nn.CrossEntropyLoss(),
    SGD,
    (torch.randn(640, 8), torch.arange(640) % 3),
    batch_size=64,
    name="net",
)
THERE = measurements_of(replace(described("8xh100"), gpus=2))
MISSING = object()
# What a field may hold in place of its own; numbers beyond those of a computer with them.
VALUES = (MISSING, None, True, -1, 0, 10**400, 1e308, "", [], [None], {}, {"a": [1]})


@pytest.fixture(scope="module")
def asked():
    return asked_of(JOB, AUTO, AUTO, "math", 8, AUTO, None, simulated(cores=2))


def profile():
    alone, of_two = workload((16, 32, 64), model="net"), workload((16, 32, 64), devices=2, model="net")
    return replace(
        alone, timings=[*alone.timings, *of_two.timings], fits=[*alone.fits, *of_two.fits], buckets=[2_000, 2_000],
        step_kinds_left={"graph": "not asked for"}, machine={"threads": 1}, collectives=[], busy="1.8 of 2 processors",
        memory={**alone.memory, "peak": [*alone.memory["peak"], *of_two.memory["peak"]]},
    )  # fmt: skip


def machine_figures():
    sizes = {1024: 1e-4, 1 << 20: 1e-3}
    found = measurements(
        *timed(sizes), *after_work(sizes), *beside(1.1, 1.2), *beside(1.1, 1.2, "threads"), turns(1e-4),
        *sums(sizes), *slowdown(sizes), *two_devices(1.0, 1.1), *copies(1e9),
        figure("compute", "matrix product", "FLOP/s", 1e11, device="cpu", dtype="fp32"),
        figure("compute", "elementwise add", "1/s", 1e9, device="cpu", dtype="fp32", elements=1 << 20),
        figure("compute", "launch", "s", 1e-6, device="cpu", until="done"),
    )  # fmt: skip
    entries = [entry(each["name"], busy="1.8 of 2 processors") for each in found.experiments]
    return replace(found, experiments=entries, machine={"cpu": "a CPU", "usable": 2, "gpus": []})


def price(asked, own, figures):
    """Price all that is asked for, here and elsewhere. What comes after that, in a plan, reads prices only."""
    with suppress(UsageError):
        moved(own, figures, THERE)
    of_each = pricer({"cpu": own}, {"cpu": figures}, 8)
    for candidate in asked.candidates(lambda device: own.step_kinds())[0]:
        with suppress(UsageError):
            of_each(candidate, 64)


def read_workload(data, asked):
    own = Workload.from_dict(data)
    layers.lines_of(own)
    doubts.of_profile(own, given=True)
    workloads_given(own, asked)
    price(asked, own, machine_figures())


def read_measurements(data, asked):
    figures = Measurements.from_dict(data)
    measured.lines_of(figures)
    doubts.of_measurements(figures.experiments, given=True)
    price(asked, profile(), measurements_given(figures))


def a_plan():
    record = planned(model="net", batch_size=64, left=[], history={"checks": 1, "mean_error": 0.1})
    rows = copy.deepcopy(record.candidates)
    for row in rows:
        row.update(
            batch_size=64,
            measured_step_s=row["step_s"],
            error=0.0,
            rounds=[1.0],
            notes=["a note"],
            step_kind="eager",
        )
    left = [{"strategy": "x", "devices": 3, "device_set": ["cpu"], "step_kind": "eager", "why": "so"}]
    basis = [{"device": "cpu", "device_name": "a CPU", "made": "2026-01-01", "age_s": 1.0, "new": True}]
    check = {"candidates": 3, "mean_error": 0.5, "right_order": 3, "pairs": 3}
    close = {"part": 0.1, "checks": 1, "mean_error": 0.1}
    return replace(
        record, candidates=rows, left=left, workloads=basis, measurements=basis, check=check, too_close=close,
        machine={"cpu": "a CPU", "gpus": ["a GPU"]},
    )  # fmt: skip


def read_plan(data, asked):
    record = Planned.from_dict(data)
    by_plan(record, Going(JOB, AUTO, None, AUTO, "math", 8))
    plans.lines_of(record)
    plan_plots.curves(record)
    repr(record)


def a_training():
    epoch = {"epoch": 1, "seconds": 1.0, "samples_per_s": 64.0, "train_loss": 1.0, "accuracy": 0.5}
    return Training(
        model="net", strategy="single", devices=1, device_set=["cpu"], layout={}, exactness="math", step_kind="eager",
        precision="fp32", batch_size=64, seed=0, steps=10, resumed_from_step=None, predicted_step_s=None,
        measured_step_s=1e-3, input_wait_s=0.0, peak_memory_bytes=[1], weights_sha256="0", epochs=[epoch], best=None,
        notices=[], versions={}, started="2026-01-01", wall_s=1.0,
    )  # fmt: skip


def read_training(data, asked):
    record = Training.from_dict(data)
    curves.layout_text(record)
    curves._panels(record.epochs)
    if record.epochs:
        curves._footer(record)
    lines.last_figures(record)


def a_proof():
    row = {
        "strategy": "data=2", "devices": 2, "device_set": ["cpu"] * 2, "level": "math", "equal": "ulps", "reason": "",
        "max_ulps": 1.0, "max_abs_diff": 0.0, "first_difference": None, "tensors": 2, "step_kind": "eager",
    }  # fmt: skip
    certificate = {
        "holds_within": {"device": "cpu"}, "model": "net", "batch_size": 64, "precision": "fp32", "seed": 0,
        "steps": [{"loss": "0"}],
    }  # fmt: skip
    return Proof("net", {}, "pass", 64, "fp32", 1, [row], [], certificate)


def read_proof(data, asked):
    record = Proof.from_dict(data)
    str(record)
    repr(record)
    if record.certificate is not None:
        first_disagreement(a_proof().certificate, record.certificate)


def a_tuning():
    row = {"stage": "s", "choice": {"fused": True}, "step_s": 1e-3, "spread": 0.1, "ratio": 1.0, "cost_s": 1.0,
           "verdict": "chosen"}  # fmt: skip
    return Tuning(
        "net", "single", 1, ["cpu"], "math", "fp32", 64, {"fused": True}, "measured", "", "2026-01-01", [row], 1.0, 2.0,
        1e-3, 1e-3, [], {},
    )  # fmt: skip


def read_machine(data, asked):
    there = Machine.from_dict(data)
    cluster_of(there)
    figures = measurements_of(there)
    measured.lines_of(figures)


KINDS = {
    "workload": (profile, read_workload),
    "measurements": (machine_figures, read_measurements),
    "plan": (a_plan, read_plan),
    "train": (a_training, read_training),
    "proof": (a_proof, read_proof),
    "tune": (a_tuning, lambda data, asked: tuning.lines_of(Tuning.from_dict(data))),
    "machine": (lambda: replace(described("8xh100"), gpus=2), read_machine),
    "cluster": (lambda: simulated(gpus=1), lambda data, asked: Cluster.from_dict(data)),
    "layout": (lambda: Plan("single", {}, ["cpu"], "math", "so"), lambda data, asked: Plan.from_dict(data).devices),
}  # fmt: skip


def places(value, path=()):
    """Yield the place of each field; of a list the first of each name is enough."""
    if path:
        yield path
    if isinstance(value, dict):
        for key in value:
            yield from places(value[key], (*path, key))
    elif isinstance(value, list):
        seen = set()
        for place, each in enumerate(value):
            told = str(each.get("name")) if isinstance(each, dict) else ""
            if told not in seen:
                seen.add(told)
                yield from places(each, (*path, place))


def changed(data, path, value):
    """Return the record of a JSON text with another value at a place."""
    made = json.loads(data)
    held = made
    for key in path[:-1]:
        held = held[key]
    if value is MISSING:
        held.pop(path[-1])
    else:
        held[path[-1]] = value
    return made


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_of_a_record_is_taken_or_refused_whatever_it_holds(kind, asked):
    make, use = KINDS[kind]
    text = make().to_json()
    use(json.loads(text), asked)
    faults, refused = [], 0
    for path in places(json.loads(text)):
        for value in VALUES:
            try:
                use(changed(text, path, value), asked)
            except UsageError:
                refused += 1
            except Exception as error:
                faults.append((path, "missing" if value is MISSING else shown(value), line_of(error)))
    assert not faults, "\n".join(map(str, faults))
    assert refused > 10


def test_a_plan_can_be_made_of_what_is_read_here(asked):
    """So that nothing above is refused, or taken, because it never was of the form."""
    record = ranked(asked, Known({"cpu": profile()}, {"cpu": machine_figures()}), 0.0)
    assert {row["strategy"] for row in record.candidates} == {"single", "data=2", "threads=2"}
