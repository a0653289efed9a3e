"""Plans for GPUs: every step kind is timed and priced, and its memory is what the allocator then gives out."""

import gc
from functools import partial

import pytest
import torch
from torch import nn

import kway
from kway.planned import spelled_set
from kway.profiling.workspaces import without_workspaces
from kway.step.kinds import KINDS
from kway.zoo import get

pytestmark = pytest.mark.gpu

SAMPLES, BATCH = 2048, 256


def job(model="lenet"):
    draw = torch.Generator().manual_seed(0)
    data = torch.randn(SAMPLES, 1, 28, 28, generator=draw), torch.randint(10, (SAMPLES,), generator=draw)
    make, sgd = partial(get(model), (1, 28, 28), 10), partial(torch.optim.SGD, lr=0.01)
    return kway.Job(make, nn.CrossEntropyLoss(), sgd, data, batch_size=BATCH, name=model)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def peak_of(row, model):
    # As in a process of its own.
    gc.collect()
    without_workspaces()
    run = kway.train(
        job(model), devices=spelled_set(row["device_set"]), step_kind=row["step_kind"],
        strategy=row["strategy"], steps=10, tune=False, echo=False,
    )  # fmt: skip
    assert run.record.step_kind == row["step_kind"]
    return max(run.record.peak_memory_bytes)


@pytest.mark.parametrize("model", ["lenet", "mlp"])
def test_every_step_kind_is_planned_with_the_memory_that_it_takes(one, model):
    planned = kway.plan(job(model), devices=one)
    assert {row["step_kind"] for row in planned.candidates} == {*KINDS}
    assert planned.left == []
    found = {row["step_kind"]: row["memory_bytes"] / peak_of(row, model) for row in planned.candidates}
    assert found == {kind: pytest.approx(1, abs=0.1) for kind in KINDS}


@pytest.mark.timeout(300)
def test_two_gpus_are_planned_in_every_step_kind(two):
    planned = kway.plan(job(), devices=f"cuda:0 {two}", strategy="single,data")
    rows = {(row["strategy"], row["step_kind"]): row for row in planned.candidates}
    assert {*rows} == {(strategy, kind) for strategy in ("single", "data=2") for kind in KINDS}
    for kind in ("eager", "compiled-graph"):
        row = rows["data=2", kind]
        assert row["memory_bytes"] / peak_of(row, "lenet") == pytest.approx(1, abs=0.1)


def test_what_is_profiled_of_a_gpu(one):
    record = kway.profile(job(), devices=one, step_kind="eager,graph", seconds=2)
    assert record.step_kinds() == ["eager", "graph"]
    states = sum(record.parameters[name] for name in ("bytes", "gradient_bytes", "optimizer_bytes"))
    assert all(each["bytes"] >= states for each in record.memory["peak"])
    assert record.device_name
    eager, graph = (record.timed(kind)[-1]["seconds"] for kind in ("eager", "graph"))
    # Hundreds of launches become one. How much that saves hangs on what else the machine does.
    assert graph < eager


def test_large_gradients_lie_in_no_vector(two):
    # A weight of 1 MiB, and a bias of 128 KiB.
    draw = torch.Generator().manual_seed(0)
    data = torch.randn(64, 8, generator=draw), torch.randint(4, (64,), generator=draw)
    sgd = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
    wide = kway.Job(partial(nn.Linear, 8, 1 << 15), nn.CrossEntropyLoss(), sgd, data, batch_size=16)
    record = kway.profile(wide, devices=two, step_kind="eager", seconds=1)
    assert 1 << 17 <= record.memory["vector_bytes"] < 1 << 18
    assert record.memory["first_copies_bytes"] == 0


def test_what_cublas_works_in_can_be_given_back(one):
    def taken():
        return torch.cuda.memory_allocated(one)

    a = torch.randn(512, 512, device=one)
    a @ a
    before = taken()
    without_workspaces()
    assert taken() < before


def test_auto_starts_at_once_where_there_is_nothing_to_choose(one):
    run = kway.train(job(), devices=one, strategy="auto", step_kind="eager", epochs=1, echo=False)
    assert run.record.predicted_step_s is None


def test_auto_takes_the_step_kind_of_a_plan_that_is_remembered(one):
    best = kway.plan(job(), devices=one).best
    run = kway.train(job(), devices=one, strategy="auto", epochs=5, echo=False)
    assert run.record.step_kind == best["step_kind"] != "eager"


def test_auto_runs_what_it_plans_and_says_how_far_it_was_off(two):
    run = kway.train(job(), devices=two, strategy="auto", epochs=40, echo=False)
    # Without a plan what needs no compiler is looked at, and hundreds of launches become one.
    assert run.record.step_kind == "graph"
    assert run.record.predicted_step_s > 0
    assert run.record.measured_step_s > 0
