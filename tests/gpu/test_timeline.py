"""Recorded steps on GPUs: kernels are seen, those of replayed steps too, and the parts add up."""

import gzip
import json
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

import kway
from kway.devices.compilers import missing
from kway.report.timeline import PARTS
from kway.step.kinds import KINDS
from kway.zoo import get

pytestmark = pytest.mark.gpu


def job(batch=64):
    draw = torch.Generator().manual_seed(2)
    data = torch.rand(16 * batch, 3, 32, 32, generator=draw), torch.randint(10, (16 * batch,), generator=draw)
    return kway.Job(
        model=partial(get("resnet18"), (3, 32, 32), 10),
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        data=data,
        batch_size=batch,
    )


def kind_here(kind):
    if KINDS[kind].compiles and missing("cuda") is not None:
        pytest.skip(f"torch.compile: {missing('cuda')}")
    return kind


def check(run, count):
    timeline = run.record.timeline
    assert timeline["steps"] == [7, 8, 9, 10, 11], run.record.notices
    assert len(timeline["ranks"]) == count
    events = json.loads(gzip.decompress((run.folder / timeline["file"]).read_bytes()))["traceEvents"]
    for row in timeline["ranks"]:
        assert sum(row[part] for part in PARTS) == pytest.approx(row["step_s"], rel=0.03)
        # A replayed step is kernels alone. On a GPU ResNet-18 computes for milliseconds, however slow the host is.
        assert row["compute_s"] > 1e-3
        assert (row["exposed_communication_s"] + row["hidden_communication_s"] > 0) == (count > 1)
        kernels = [event for event in events if event["pid"] == row["rank"] and event.get("cat") == "kernel"]
        assert len(kernels) > 5 * 20
        # Some microseconds beyond the end of a window are the profiler's own error.
        assert all(-1000 <= event["ts"] <= 60e6 for event in kernels)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("devices", "ranks"), [("one", 1), ("two", 2)])
def test_the_parts_of_recorded_steps_add_up(request, devices, ranks, kind, tmp_path):
    run = kway.train(
        job(),
        devices=request.getfixturevalue(devices),
        epochs=1,
        step_kind=kind_here(kind),
        timeline=5,
        out=tmp_path / "run",
    )
    assert run.record.step_kind == kind, run.record.notices
    check(run, ranks)


def test_what_lies_between_steps_is_left_out_and_the_profiler_can_go_on(one, tmp_path):
    """The profiler is started again after each validation."""
    whole = job()
    held = tuple(part[:64] for part in whole.data)
    run = kway.train(
        replace(whole, validation=held),
        devices=one,
        epochs=1,
        step_kind="graph",
        validate_every="2steps",
        timeline=5,
        out=tmp_path / "run",
    )
    check(run, 1)
