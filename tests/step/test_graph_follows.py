"""What recorded steps follow, and what they leave to steps that are taken as they are."""

from dataclasses import dataclass, field, replace
from functools import partial

import pytest
import torch
from tests.step.recorded import Net, Scaled, after, opened, share
from torch import nn

from kway.step.attributes import Attributes
from kway.step.graph import GraphedStep


@dataclass
class Batch:
    x: torch.Tensor
    target: torch.Tensor


@dataclass
class Scaling:
    """Changes one of its fields, computes another, and keeps something that is none."""

    x: torch.Tensor
    target: torch.Tensor
    mean: torch.Tensor = field(init=False)

    def __post_init__(self):
        self.x = self.x / 255
        self.mean = self.x.mean(0)
        self.positive = self.x > 0


class Number:
    """Of which no two can be compared."""


@dataclass
class Numbered(Batch):
    def __post_init__(self):
        self.number = Number()


@pytest.mark.parametrize(("kind", "recorded"), [(Batch, True), (Scaling, True), (Numbered, False)])
def test_dataclasses_are_filled_in_also_with_what_they_compute(kind, recorded):
    class Model(Net):
        def forward(self, batch):
            # What was computed of this batch, and not of the one that was recorded.
            return self.inner(batch.x - getattr(batch, "mean", 0) + getattr(batch, "positive", 0))

    options = {
        "optimizer": partial(torch.optim.SGD, lr=0.1),
        "inputs": lambda b: b,
        "target": lambda b: b.target,
    }
    _, graphed, recorder = opened(Model(), **options)
    plain, *_ = opened(Model(), **options)
    for step in range(6):
        (x, y), _ = share(step).micro[0]
        own = replace(share(step), micro=[(kind(x.clone(), y), 6)])
        assert graphed.run(own, step).loss.item() == pytest.approx(
            plain._step.run(own, step).loss.item(), abs=1e-6
        )
    assert bool(recorder.made) == recorded
    assert bool(graphed.notices) != recorded


CHANGES = {
    "attribute": lambda model: setattr(model, "scale", 3.0),
    "buffer": lambda model: setattr(model, "mask", torch.zeros(3)),
    "mode": lambda model: model.inner[1].eval(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_is_changed_between_steps_is_followed(change):
    engine, graphed, recorder = opened(Scaled(), optimizer=partial(torch.optim.SGD, lr=0.1))
    plain, other, _ = opened(Scaled(), optimizer=partial(torch.optim.SGD, lr=0.1))
    after(graphed, 5, lambda: change(engine.model))
    other.run = plain._step.run
    after(other, 5, lambda: change(plain.model))
    assert len(recorder.made) == 2
    for name, value in plain.model.state_dict().items():
        torch.testing.assert_close(engine.model.state_dict()[name], value)


def moved(tensor):
    tensor.data = tensor.data.clone()


MOVES = {
    "all": lambda model: model._apply(torch.clone),
    "one": lambda model: moved(model[0].bias),
    "there and back": lambda model: (model.to(torch.float64), model.to(torch.float32)),
}


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
def test_parameters_that_lie_elsewhere_are_recorded_anew(move):
    def model():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))

    sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    engine, graphed, recorder = opened(model(), optimizer=sgd)
    plain, other, _ = opened(model(), optimizer=sgd)
    objects = [*engine.model.parameters()]
    after(graphed, 5, lambda: move(engine.model))
    other.run = plain._step.run
    after(other, 5, lambda: None)
    assert all(a is b for a, b in zip(objects, engine.model.parameters(), strict=True))
    assert [made.closed for made in recorder.made] == [True, False]
    assert [made.replays for made in recorder.made] == [2, 2]
    for name, value in plain.model.state_dict().items():
        torch.testing.assert_close(engine.model.state_dict()[name], value)


def test_a_buffer_whose_data_are_elsewhere_is_recorded_anew():
    engine, graphed, recorder = opened(Scaled(), optimizer=partial(torch.optim.SGD, lr=0.1))
    after(graphed, 5, lambda: moved(engine.model.mask))
    assert [made.closed for made in recorder.made] == [True, False]


def test_a_model_with_a_sparse_buffer_is_looked_at_all_the_same():
    model = nn.Linear(2, 2)
    model.register_buffer("edges", torch.eye(2).to_sparse())
    look = Attributes(model)
    assert look.unchanged()
    moved(model.weight)
    assert not look.unchanged()


def test_a_loss_that_is_changed_between_steps_is_followed():
    def change(engine):
        engine.job.loss.label_smoothing = 0.5

    engine, graphed, recorder = opened(Net(), optimizer=partial(torch.optim.SGD, lr=0.1))
    plain, other, _ = opened(Net(), optimizer=partial(torch.optim.SGD, lr=0.1))
    after(graphed, 5, lambda: change(engine))
    other.run = plain._step.run
    after(other, 5, lambda: change(plain))
    assert len(recorder.made) == 2
    for name, value in plain.model.state_dict().items():
        torch.testing.assert_close(engine.model.state_dict()[name], value)


class CountingLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, output, target):
        self.calls += 1
        return nn.functional.cross_entropy(output, target, reduction="none") * (
            1.0 if self.calls < 6 else 2.0
        )


def closure():
    calls = [0]

    def loss(output, target):
        calls[0] += 1
        return nn.functional.cross_entropy(output, target, reduction="none") * (1.0 if calls[0] < 6 else 2.0)

    return loss


@pytest.mark.parametrize("make", [CountingLoss, closure])
@pytest.mark.parametrize("traced", [True, False])
def test_a_loss_that_keeps_something_is_named(make, traced):
    engine, graphed, recorder = opened(Net(), optimizer=partial(torch.optim.SGD, lr=0.1), loss=make())
    graphed = GraphedStep(engine._step, recorder, traced=traced)
    for step in range(8):
        graphed.run(share(step), step)
    assert all(made.replays == 0 for made in recorder.made)
    assert "keeps" in graphed.notices[0]
    assert graphed.ran == "eager"
    assert graphed.kind == "graph"


def test_options_that_change_with_every_step_are_named():
    schedule = partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=40)
    sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    _, graphed, recorder = opened(Net(), optimizer=sgd, schedule=schedule)
    for step in range(20):
        graphed.run(share(step), step)
    assert not recorder.made
    assert "options of the optimizer beside its learning rate (momentum) keep" in graphed.notices[-1]
    assert (graphed.ran, graphed.at_the_end) == ("eager", [])


def test_sparse_gradients_follow_outside():
    class Sparse(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.table = nn.EmbeddingBag(8, 2, sparse=True)

        def forward(self, x):
            return self.table((x.abs() * 7).long().clamp(0, 7))

    engine, graphed, _ = opened(Sparse(), optimizer=partial(torch.optim.SGD, lr=0.1))
    plain, *_ = opened(Sparse(), optimizer=partial(torch.optim.SGD, lr=0.1))
    for step in range(6):
        graphed.run(share(step), step)
        plain._step.run(share(step), step)
    assert "sparse" in graphed.notices[0]
    torch.testing.assert_close(engine.model.table.weight, plain.model.table.weight)


def test_a_failed_recording_leaves_no_trace_of_its_collectives():
    engine, graphed, recorder = opened(Net(), optimizer=partial(torch.optim.SGD, lr=0.1))
    trace, told = engine._step.group.trace, []

    def fails(work, places):
        trace.note("sum", (3,), torch.float32)
        raise RuntimeError("out of memory")

    recorder.record = fails
    for step in range(5):
        graphed.run(share(step), step)
        told.append(trace.left)
    assert set(told) == {0}


def test_options_that_change_seldom_are_recorded_each_time():
    engine, graphed, recorder = opened(Net(), optimizer=partial(torch.optim.SGD, lr=0.1))
    own = [0]
    for step in range(40 * 12):
        engine.optimizer.param_groups[0]["weight_decay"] = 0.01 * (step // 40)
        engine.optimizer.param_groups[0]["own"] = own
        own[0] = step // 40
        graphed.run(share(step), step)
    assert graphed.notices == []
    assert len(recorder.made) == 12
    assert [made.closed for made in recorder.made] == [True] * 11 + [False]
