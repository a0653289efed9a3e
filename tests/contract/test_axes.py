"""What every file of strategies/ with an AXIS promises."""

import pickle
from functools import partial
from importlib import import_module
from math import isfinite

import pytest
import torch
from tests.measured import usual
from tests.workloads import workload
from torch import nn

import kway
from kway.jobs.place import place
from kway.registry import modules_of
from kway.step.kinds import KINDS
from kway.strategies.base import Axis
from kway.strategies.engine import Engine
from kway.strategies.layout import axes, check_step_kind, fit, named_sizes, title
from kway.strategies.levels import LEVELS
from kway.strategies.pricing import priced
from kway.world import World

AXES = axes()


@pytest.fixture(params=sorted(AXES))
def axis(request):
    return AXES[request.param]


def net():
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))


X, Y = torch.randn(13, 1, 4, 4, generator=torch.Generator().manual_seed(0)), torch.arange(13) % 3


def job_of(model=net):
    return kway.Job(
        model=model,
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        data=(X, Y),
        batch_size=13,
        precision="fp64",
    )


def test_every_axis_of_the_folder_is_found_once():
    files = list(modules_of("kway.strategies"))
    assert AXES
    assert set(AXES) <= set(files)
    names = [name for axis in AXES.values() for name in (axis.name, *axis.aliases)]
    assert len(names) == len(set(names))
    assert "single" not in names
    assert len({axis.order for axis in AXES.values()}) == len(AXES)


def test_attributes_have_their_types(axis):
    assert isinstance(axis, Axis)
    assert axis.name.isidentifier()
    assert axis.name.islower()
    assert type(axis.order) is int
    assert type(axis.splits_batch) is bool
    assert axis.levels
    assert axis.levels <= set(LEVELS)
    assert type(axis).__doc__
    assert axis.refuses(job_of(), net(), 2, "math") is None or isinstance(
        axis.refuses(job_of(), net(), 2, "math"), str
    )


@pytest.mark.parametrize("devices", [1, 2, 3, 4, 7, 8])
def test_sizes_are_increasing_and_fit_the_devices(axis, devices):
    sizes = axis.sizes(devices)
    assert sizes == sorted(set(sizes))
    assert all(type(size) is int and 1 <= size <= devices for size in sizes)


def test_its_names_read_and_write_as_layouts(axis):
    for name in (axis.name, *axis.aliases):
        assert named_sizes(name) == [(axis.name, None)]
        assert fit(f"{name}=2", 2) == fit(name, 2) == {axis.name: 2}
    assert title({axis.name: 3}) == f"{axis.name}=3"


def test_it_runs_step_kinds_that_there_are_and_says_why_not_others(axis):
    assert axis.kinds is None or (axis.kinds <= set(KINDS) and axis.why_kinds)
    for kind in set() if axis.kinds is None else set(KINDS) - axis.kinds:
        with pytest.raises(kway.RefusedError, match=axis.why_kinds):
            check_step_kind({axis.name: 2}, kind)


@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_its_price_is_finite_exposed_seconds_and_bytes_that_one_device_lacks(axis, size, device):
    devices = ["cpu"] * size if device == "cpu" else [f"cuda:{place}" for place in range(size)]
    measured = usual(backend="gloo" if device == "cpu" else "nccl")
    # Timed as a rank of that many: nothing has to be said of that.
    model = workload(devices=size)
    found = priced({axis.name: size}, devices, "eager", model, measured, threads=1)
    alone = priced({}, devices[:1], "eager", model, None, threads=1)
    for costs in (found.terms, found.memory):
        assert all(isfinite(value) and value >= 0 for value in costs.values())
    assert found.step_s == pytest.approx(sum(found.terms.values()))
    assert found.memory_bytes == pytest.approx(sum(found.memory.values()))
    assert (found.terms == alone.terms and found.memory == alone.memory) or size > 1
    # An axis that says nothing says that it says nothing.
    assert size == 1 or set(found.terms) > set(alone.terms) or found.notes


def test_one_process_is_no_part_of_a_product(axis):
    for other in AXES:
        if axis.one_process and other != axis.name:
            with pytest.raises(kway.UsageError, match="one process"):
                named_sizes(f"{axis.name}=2:{other}=2")


def opened_alone(layout, model):
    job = kway.Job(**{**vars(job_of()), "precision": "fp32"})
    return Engine(job, model, layout, World(), "math", 13)


def hooks_of(model):
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return [[len(getattr(module, kind)) for kind in kinds] for module in model.modules()]


def test_at_size_1_the_model_is_touched_no_more_than_without_a_layout(axis):
    plain, model = net(), net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    bare = hooks_of(model)
    without, engine = opened_alone({}, plain), opened_alone({axis.name: 1}, model)
    try:
        assert engine.model is model
        assert not any("forward" in vars(module) for module in model.modules())
        assert hooks_of(model) == hooks_of(plain)
        after = model.state_dict()
        assert list(after) == list(before)
        assert all(torch.equal(after[name], before[name]) for name in before)
    finally:
        # As they were opened, since torch's flags are the process's.
        engine.close()
        without.close()
    assert hooks_of(model) == hooks_of(plain) == bare


def open_step_close(context, layout, level):
    from kway.training.parts import training_parts

    torch.manual_seed(0)
    model = net()
    names, kinds = list(model.state_dict()), [type(module) for module in model.modules()]
    job = job_of()
    parts, _ = training_parts(job)
    engine = Engine(job, model, layout, context.world, level, 13)
    loader = engine.loader(parts)
    for share in loader.epoch(0):
        engine.step(share, 0)
    state = engine.state()
    engine.close()
    left = [name for name, module in model.named_modules() if "forward" in vars(module)]
    return {
        "names": list(state) == names == list(model.state_dict()),
        "kinds": [type(module) for module in model.modules()] == kinds,
        "left": left,
        "hooks": sum(len(p._backward_hooks or ()) for p in model.parameters()),
        "pickled": len(pickle.loads(pickle.dumps(model)).state_dict()),
        "tf32": import_module("torch.backends.cudnn").allow_tf32,
        "state": state,
    }


def on_ranks(axis, ranks, size, task, *arguments):
    """Run a task on ranks as the axis has them: processes of the pool, or threads of this one."""
    if not axis.one_process:
        return ranks.run(task, *arguments, size=size)
    where = place(f"cpu:{size}", f"{axis.name}={size}")
    return where.run(task, *arguments)


@pytest.mark.parametrize("size", [2, 3])
def test_it_closes_cleanly_and_leaves_one_state_on_all_ranks(axis, ranks, size, monkeypatch):
    # Ranks that are threads of this process find what other tests have left in it.
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    for level in sorted(axis.levels):
        found = on_ranks(axis, ranks, size, open_step_close, {axis.name: size}, level)
        for rank in found:
            assert rank["names"]
            assert rank["kinds"]
            assert rank["left"] == []
            assert rank["hooks"] == 0
            assert rank["pickled"] == len(rank["state"])
            assert rank["tf32"] is True  # what torch starts with
            for name, value in rank["state"].items():
                assert torch.equal(value, found[0]["state"][name]), name


def test_a_level_that_it_does_not_keep_is_refused_with_those_it_keeps(axis):
    for level in set(LEVELS) - axis.levels:
        with pytest.raises(kway.RefusedError, match=level):
            Engine(job_of(), net(), {axis.name: 1}, World(), level, 13)
    with pytest.raises(kway.UsageError, match="math"):
        Engine(job_of(), net(), {axis.name: 1}, World(), "exact", 13)
