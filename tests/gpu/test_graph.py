"""Recorded steps on a GPU: the numbers of eager ones, no waits, and what cannot be recorded."""

import gc
from functools import partial

import pytest
import torch
from torch import nn

import kway
from kway.data.loader import Share
from kway.data.order import bounds
from kway.step.graph import GraphedStep
from kway.step.scaling import LrScale, ScaledSchedule
from kway.strategies.engine import Engine
from kway.world import World
from kway.zoo import get

pytestmark = pytest.mark.gpu

SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
STEPS = 12


class Dropping(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(
            nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 10)
        )

    def forward(self, x):
        return self.inner(x)


MODELS = {
    "dropout": Dropping,
    **{name: partial(get(name), (1, 28, 28), 10) for name in ("lenet", "resnet18")},
}


def share(step, samples, world, shards):
    """One rank's share of a batch that follows from ``step``, on its device."""
    draw = torch.Generator().manual_seed(step)
    x, y = torch.rand(samples, 1, 28, 28, generator=draw), torch.randint(10, (samples,), generator=draw)
    place = bounds(shards or world.size, world.size, world.rank) if shards else (world.rank, world.rank + 1)
    cuts = [bounds(samples, shards or world.size, number) for number in range(*place)]
    micro = [((x[a:b].to(world.device), y[a:b].to(world.device)), b - a) for a, b in cuts]
    return Share(micro, sum(count for _, count in micro), samples, 0, step, y.numpy())


def right(output, target):
    return (output.argmax(1) == target).double()


def run(world, model, precision, level, kind, sizes=(64,), **options):
    """Take steps; return losses, weights, metrics, and what was recorded and said."""
    torch.manual_seed(0)
    job = kway.Job(
        model=MODELS[model](), data=(torch.zeros(64, 1, 28, 28), torch.zeros(64)), batch_size=64,
        loss=nn.CrossEntropyLoss(), precision=precision, metrics={"right": right}, **{"optimizer": SGD} | options,
    )  # fmt: skip
    layout = {"data": world.size} if world.size > 1 else {}
    shards = 4 if level == "bits" else None
    engine = Engine(job, job.model, layout, world, level, 64, 4)
    try:
        graphed = GraphedStep(engine._step)
        tally = engine.tally(["right"])
        outcomes = []
        for step in range(STEPS):
            own = share(step, sizes[step % len(sizes)], world, shards)
            if kind == "graph":
                outcomes.append(graphed.run(own, step, tally))
                continue
            # The arithmetic of the kind, one operation after another.
            engine._step.prepare(own)
            graphed._rates.adapt()
            graphed._rates.fill()
            outcomes.append(graphed._as_it_is(own, engine._step.seeds(own, step), tally))
        return {
            "losses": [float(outcome.loss) for outcome in outcomes],
            "weights": {name: value.cpu() for name, value in engine.model.state_dict().items()},
            "metrics": tally.result(engine.part.batch_group),
            "recorded": len(graphed._recorded),
            "notices": graphed.notices,
        }
    finally:
        engine.close()


def equal(eager, graph):
    assert graph["losses"] == eager["losses"]
    for name, value in eager["weights"].items():
        assert torch.equal(graph["weights"][name], value), name
    assert graph["metrics"] == eager["metrics"]


@pytest.mark.parametrize(
    ("model", "precision"),
    [
        ("lenet", "fp32"),
        ("resnet18", "fp32"),
        ("resnet18", "tf32"),
        ("resnet18", "bf16"),
        ("dropout", "fp32"),
    ],
)
@pytest.mark.parametrize("sizes", [(64,), (64, 64, 23)], ids=["whole", "partial"])
def test_recorded_steps_have_the_bits_of_eager_ones(model, precision, sizes):
    world = World(device="cuda:0")
    eager = run(world, model, precision, "bits", "eager", sizes)
    graph = run(world, model, precision, "bits", "graph", sizes)
    assert graph["recorded"] == len(set(sizes))
    assert graph["notices"] == []
    equal(eager, graph)


def both(context, *arguments):
    return [run(context.world, *arguments[:3], kind, *arguments[3:]) for kind in ("eager", "graph")]


@pytest.mark.parametrize(
    ("model", "precision", "level"),
    [
        ("resnet18", "bf16", "bits"),
        ("resnet18", "bf16", "math"),
        ("resnet18", "bf16", "loose"),
        ("dropout", "fp32", "math"),
    ],
)
def test_reductions_are_recorded(pair, model, precision, level):
    for eager, graph in pair.run(both, model, precision, level):
        assert graph["recorded"] == 1
        assert graph["notices"] == []
        equal(eager, graph)


def test_clipping_average_penalty_and_schedule_are_recorded():
    def penalty(model):
        return 1e-4 * sum((p**2).sum() for p in model.parameters())

    schedule = partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.8)
    options = {"clip": 1.0, "ema": 0.9, "penalty": penalty, "schedule": schedule}
    world = World(device="cuda:0")
    eager = run(world, "dropout", "fp32", "bits", "eager", **options)
    graph = run(world, "dropout", "fp32", "bits", "graph", **options)
    assert graph["recorded"] == 1
    equal(eager, graph)


def test_rates_that_are_scaled_and_warmed_up_are_followed_by_recorded_steps():
    own = partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.8)
    options = {"schedule": ScaledSchedule(own, LrScale("linear", 4, STEPS - 1))}
    world = World(device="cuda:0")
    eager = run(world, "dropout", "fp32", "bits", "eager", **options)
    graph = run(world, "dropout", "fp32", "bits", "graph", **options)
    assert graph["recorded"] == 1
    equal(eager, graph)


@pytest.mark.parametrize(
    "make", [torch.optim.AdamW, torch.optim.Adam, torch.optim.RMSprop, torch.optim.NAdam, torch.optim.RAdam,
             torch.optim.Adamax, torch.optim.Adadelta, torch.optim.Adagrad],
)  # fmt: skip
def test_optimizers_follow_recorded_steps(make):
    world = World(device="cuda:0")
    options = {"optimizer": partial(make, lr=0.01)}
    eager = run(world, "dropout", "fp64", "math", "eager", **options)
    graph = run(world, "dropout", "fp64", "math", "graph", **options)
    assert graph["recorded"] == 1
    for name, value in eager["weights"].items():
        torch.testing.assert_close(graph["weights"][name], value, rtol=0, atol=1e-12)


class Reading(Dropping):
    def forward(self, x):
        return self.inner(x) * (2.0 if float(x.sum()) > 0 else 3.0)


class Hooked(Dropping):
    def forward(self, x):
        out = self.inner(x)
        return out + torch.tensor([0.0] * 10, device=out.device)


@pytest.mark.parametrize("kind", [Reading, Hooked])
def test_a_step_that_waits_for_the_device_is_named_and_goes_on(monkeypatch, kind):
    monkeypatch.setitem(MODELS, "waiting", kind)
    world = World(device="cuda:0")
    eager = run(world, "waiting", "fp32", "bits", "eager")
    graph = run(world, "waiting", "fp32", "bits", "graph")
    assert graph["recorded"] == 0
    assert "reads a value back" in graph["notices"][0]
    assert "test_graph.py" in graph["notices"][0]
    equal(eager, graph)


def test_recorded_runs_leave_no_memory_of_their_own():
    def left():
        run(World(device="cuda:0"), "lenet", "fp32", "loose", "graph")
        gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.memory_allocated(0)

    # The first one leaves what cuBLAS keeps for its streams.
    first = left()
    assert [left() for _ in range(3)] == [first] * 3


def test_recorded_steps_make_the_host_wait_for_nothing():
    world = World(device="cuda:0")
    torch.manual_seed(0)
    data = torch.zeros(64, 1, 28, 28), torch.zeros(64)
    job = kway.Job(
        model=MODELS["resnet18"](), data=data, batch_size=64, loss=nn.CrossEntropyLoss(), optimizer=SGD
    )
    engine = Engine(job, job.model, {}, world, "math", 64)
    try:
        graphed = GraphedStep(engine._step)
        own = share(0, 64, world, None)
        for step in range(6):
            graphed.run(own, step)
        assert graphed._recorded
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        for step in range(6, 12):
            graphed.run(own, step)
    finally:
        torch.cuda.set_sync_debug_mode("default")
        engine.close()
