"""Scripted and traced layers: those that may use the statistics of a device's own samples are refused."""

import io
from functools import partial

import pytest
import torch
from torch import nn

import kway

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
X, Y = torch.rand(8, 3), torch.arange(8) % 2


def job_of(model):
    return kway.Job(
        model=model,
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        data=(X, Y),
        batch_size=8,
    )


def scripted():
    return torch.jit.script(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)))


@pytest.mark.parametrize(
    ("devices", "level", "refused"),
    [("cpu:1", "math", False), ("cpu:2", "math", True), ("cpu:1", "bits", True), ("cpu:1", "loose", False)],
)
def test_layers_in_compiled_code_are_refused_where_a_batch_is_cut(ranks, devices, level, refused):
    job = job_of(scripted)
    if not refused:
        kway.train(job, devices=devices, exactness=level, epochs=1, ranks=ranks, echo=False)
        return
    with pytest.raises(kway.RefusedError, match=r"'1' \(scripted\)"):
        kway.train(job, devices=devices, exactness=level, epochs=1, ranks=ranks, echo=False)


class Backbone(nn.Module):
    """A scripted part with frozen statistics below a head that is trained."""

    def __init__(self):
        super().__init__()
        self.body, self.head = scripted(), nn.Linear(2, 2)

    def train(self, mode=True):
        super().train(mode)
        self.body.eval()
        return self

    def forward(self, x):
        return self.head(self.body(x))


def test_layers_in_compiled_code_that_use_no_batch_statistics_are_welcome(ranks):
    job = job_of(Backbone)
    kway.train(job, devices="cpu:2", epochs=1, ranks=ranks, echo=False)
    model = scripted()
    judged = job_of(model)
    alone = kway.evaluate(judged, devices="cpu:1", strategy="single")
    assert kway.evaluate(judged, devices="cpu:1", strategy="single") == alone
    wide = kway.Job(**{**vars(judged), "precision": "fp64"})
    kway.evaluate(wide, devices="cpu:1", strategy="single")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def loaded(module):
    held = io.BytesIO()
    torch.jit.save(module, held)
    held.seek(0)
    return torch.jit.load(held)


def traced(trains):
    return torch.jit.trace(nn.BatchNorm1d(4).train(trains), torch.randn(5, 4), check_trace=False).eval()


class Norm(nn.BatchNorm1d):
    """A layer of another name."""


class Function(nn.Module):
    """No layer at all."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("var", torch.ones(4))

    def forward(self, x):
        return nn.functional.batch_norm(x, self.mean, self.var, training=self.training)


class Flagged(nn.Module):
    """Chooses by a flag of its own."""

    def __init__(self, live):
        super().__init__()
        self.live = live
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("var", torch.ones(4))

    def forward(self, x):
        return nn.functional.batch_norm(x, self.mean, self.var, training=self.live or x.shape[0] > 1)


class Plain(Flagged):
    def forward(self, x):
        return nn.functional.batch_norm(x, self.mean, self.var, training=self.live)


class Beside(nn.Module):
    """Normalises in another method than forward."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x):
        return x

    @torch.jit.export
    def features(self, x):
        return self.norm(x)


class Forked(nn.Module):
    """Normalises in a graph that is forked off."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x):
        return torch.jit.wait(torch.jit.fork(self.norm, x))


class Helped(Function):
    """Has another method normalise, which is told how."""

    def norm(self, x, training: bool):
        return nn.functional.batch_norm(x, self.mean, self.var, training=training)

    def forward(self, x):
        return self.norm(x, self.training)


class ForkedAndTold(Helped):
    """Has a fork of it normalise."""

    def forward(self, x):
        return torch.jit.wait(torch.jit.fork(self.norm, x, self.training))


class SetOnTheWay(Function):
    """Comes to what normalises by a flag that it has just set."""

    flag: bool

    def __init__(self):
        super().__init__()
        self.flag = False

    def forward(self, x):
        self.flag = True
        if self.flag:
            x = nn.functional.batch_norm(x, self.mean, self.var, training=self.training)
        self.flag = False
        return x


class Branched(Function):
    """Normalises in another place for each mode."""

    def forward(self, x):
        if self.training:
            return nn.functional.batch_norm(x, self.mean, self.var, training=True)
        else:  # noqa: RET505 - TorchScript reads it so
            return nn.functional.batch_norm(x, self.mean, self.var, training=False)


def of_samples_too():
    """Running statistics beside a layer that has none, since it looks at single samples."""
    return torch.jit.script(
        nn.Sequential(nn.Unflatten(1, (2, 2)), nn.BatchNorm1d(2), nn.InstanceNorm1d(2), nn.Flatten())
    ).eval()


MADE = {
    "flag": (lambda: torch.jit.script(Plain(True)).eval(), True),
    "no flag": (lambda: torch.jit.script(Plain(False)), False),
    "told": (lambda: torch.jit.script(Helped()), True),
    # Nobody can tell who else calls what is told.
    "told, at rest": (lambda: torch.jit.script(Helped()).eval(), True),
    "forked and told": (lambda: torch.jit.script(ForkedAndTold()), True),
    "set on the way": (lambda: torch.jit.script(SetOnTheWay()), True),
    "branched": (lambda: torch.jit.script(Branched()), True),
    "branched, at rest": (lambda: torch.jit.script(Branched()).eval(), False),
    "frozen": (lambda: torch.jit.freeze(torch.jit.script(nn.BatchNorm1d(4)).eval()), False),
    "computed": (lambda: torch.jit.script(Flagged(False)), True),
    "another method": (lambda: torch.jit.script(Beside()), True),
    "another method, at rest": (lambda: torch.jit.script(Beside()).eval(), False),
    "forked": (lambda: torch.jit.script(Forked()), True),
    "beside one of single samples": (of_samples_too, False),
    "traced in training": (lambda: traced(True), True),
    "traced in training, loaded": (lambda: loaded(traced(True)), True),
    "traced": (lambda: traced(False), False),
    "traced, loaded": (lambda: loaded(traced(False)), False),
    "without running statistics": (
        lambda: torch.jit.script(nn.BatchNorm1d(4, track_running_stats=False)).eval(),
        True,
    ),
    "scripted": (lambda: torch.jit.script(nn.BatchNorm1d(4)).eval(), False),
    "scripted, in training": (lambda: torch.jit.script(nn.BatchNorm1d(4)), True),
    "subclass": (lambda: torch.jit.script(Norm(4)), True),
    "subclass, at rest": (lambda: torch.jit.script(Norm(4)).eval(), False),
    "function": (lambda: torch.jit.script(Function()), True),
    "function, at rest": (lambda: torch.jit.script(Function()).eval(), False),
    "none": (lambda: torch.jit.script(nn.Tanh()), False),
    "of single samples": (lambda: torch.jit.script(nn.InstanceNorm1d(4)).eval(), False),
}


class Holding(nn.Module):
    """A model that holds a compiled layer, in the mode that it came in."""

    def __init__(self, make):
        super().__init__()
        self.before, self.held, self.head = nn.Linear(3, 4), make(), nn.Linear(4, 2)
        self.mode = getattr(self.held, "training", False)

    def train(self, mode=True):
        super().train(mode)
        self.held.train(mode and self.mode)
        return self

    def forward(self, x):
        return self.head(self.held(self.before(x)))


@pytest.mark.parametrize("made", MADE)
def test_what_compiled_code_computes_decides(ranks, made):
    make, refused = MADE[made]
    job = job_of(lambda: Holding(make))
    options = {
        "devices": "cpu:1",
        "exactness": "bits",
        "shards": 2,
        "epochs": 1,
        "echo": False,
        "ranks": ranks,
    }
    if not refused:
        kway.train(job, **options)
        return
    with pytest.raises(kway.RefusedError, match=r"'held(.norm)?' \(scripted\)"):
        kway.train(job, **options)


def judged(context):
    """Evaluate a layer that uses batch statistics in evaluation, too, where the batch is cut."""
    layer = nn.BatchNorm1d(4, track_running_stats=False)
    plain = Holding(lambda: layer)
    compiled = Holding(lambda: torch.jit.script(layer))
    compiled.load_state_dict(plain.state_dict())
    with pytest.raises(kway.RefusedError, match="scripted"):
        kway.evaluate(job_of(compiled))
    return kway.evaluate(job_of(plain))["loss"] > 0


def test_evaluation_of_a_batch_that_is_cut_refuses_it_too(ranks):
    assert ranks.run(judged, limit=60) == [True, True]


def woken(context):
    model = Backbone()
    job = kway.Job(**{**vars(job_of(model)), "batch_size": 4})
    with kway.parallel(job, strategy="data") as p:
        first, second = p.batches(0)
        p.step(first)
        model.body.train()
        with pytest.raises(kway.RefusedError, match="scripted"):
            p.step(second)
    return True


def test_modes_that_a_loop_changes_are_looked_at_again(ranks):
    assert ranks.run(woken, limit=60) == [True, True]
