"""What a model makes when it first runs: it comes back from several devices, and a run goes on with it."""

from functools import partial

import pytest
import torch
from torch import nn

import kway

_DRAW = torch.Generator().manual_seed(0)
X, Y = torch.rand(20, 2, generator=_DRAW), torch.rand(20, 2, generator=_DRAW)


class Counts(nn.Module):
    """Makes a counter in the place of nothing, a scale in that of None, and one in no weights file."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.scale, self.table = nn.Linear(2, 2), None, None

    def forward(self, x):
        if not hasattr(self, "passes"):
            self.register_buffer("passes", torch.zeros(()))
            del self.scale, self.table
            self.register_buffer("scale", torch.ones(2))
            self.register_buffer("table", torch.ones(2), persistent=False)
        if self.training:
            self.passes += 1
            self.table *= 0.9
        return self.layer(x) * self.scale * self.table * (1 + 0.1 * torch.sin(self.passes))


class Scaled(nn.Module):
    """Makes two buffers when it first runs, and one of them moves."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.scale = nn.Linear(2, 2), None

    def forward(self, x):
        if self.scale is None:
            del self.scale
            self.register_buffer("scale", torch.ones(2))
            self.register_buffer("passes", torch.zeros(()))
        if self.training:
            self.passes += 1
        return self.layer(x) * self.scale * (1 + 0.1 * torch.sin(self.passes))


class Fixed(nn.Module):
    """Makes a parameter that is not trained."""

    def __init__(self, before=None):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(2, 2)
        if before:
            self.factor = before

    def forward(self, x):
        if not isinstance(getattr(self, "factor", None), torch.Tensor):
            vars(self).pop("factor", None)
            self.factor = nn.Parameter(torch.full((2,), 0.5), requires_grad=False)
        return self.layer(x) * self.factor


def trained(ranks, model, size, epochs=4, **more):
    job = kway.Job(
        model=model, loss=nn.MSELoss(), optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9), data=(X, Y),
        batch_size=10, ema=0.9,
    )  # fmt: skip
    strategy = "data" if size > 1 else "single"
    return kway.train(
        job, devices=f"cpu:{size}", strategy=strategy, epochs=epochs, ranks=ranks, echo=False, **more
    )


BITS = {"exactness": "bits", "shards": 4}


@pytest.fixture(scope="module")
def whole(ranks):
    """The fingerprint of the run that nobody stops."""
    return trained(ranks, Counts, 1, **BITS).record.weights_sha256


@pytest.fixture(scope="module", params=[1, 2])
def begun(request, ranks, tmp_path_factory):
    """Half of that run on so many devices, to go on from elsewhere."""
    out = tmp_path_factory.mktemp("begun") / "run"
    trained(ranks, Counts, request.param, epochs=2, out=out, checkpoint_every=1, **BITS)
    return out


@pytest.mark.parametrize("then", [1, 2])
def test_a_run_goes_on_with_the_buffers_that_the_model_made(ranks, tmp_path, whole, begun, then):
    again = trained(ranks, Counts, then, out=tmp_path / "more", resume=begun, **BITS)
    assert again.record.resumed_from_step == 4
    assert again.record.weights_sha256 == whole
    assert float(again.model.passes) == 8


@pytest.mark.parametrize("size", [1, 2])
def test_a_parameter_that_the_model_made_is_one_afterwards(ranks, tmp_path, size):
    run = trained(ranks, Fixed, size, epochs=2, out=tmp_path / "run", checkpoint_every=1)
    again = trained(ranks, Fixed, size, out=tmp_path / "more", resume=tmp_path / "run")
    for model in (run.model, again.model):
        assert not dict(model.named_parameters())["factor"].requires_grad
        assert not dict(model.named_buffers())


def test_what_takes_the_place_of_something_is_refused_by_name(ranks):
    with pytest.raises(kway.UsageError, match=r"'factor' of a Fixed was made while .* has a str there: "):
        trained(ranks, partial(Fixed, "later"), 2, epochs=1)


def judged_by(model, **more):
    sgd = partial(torch.optim.SGD, lr=0.1)
    return kway.Job(model=model, loss=nn.MSELoss(), optimizer=sgd, data=(X, Y), batch_size=10, **more)


@pytest.mark.parametrize("model", [Scaled, Fixed])
@pytest.mark.parametrize("size", [1, 2])
def test_files_of_a_run_fit_a_model_that_has_not_run(ranks, tmp_path, model, size):
    run = trained(ranks, model, size, epochs=2, out=tmp_path / "run")
    expected = kway.evaluate(judged_by(model), run.model, devices="cpu:1")
    assert kway.evaluate(judged_by(model), tmp_path / "run", devices="cpu:1") == expected
    assert kway.evaluate(judged_by(model, init=str(tmp_path / "run")), devices="cpu:1") == expected
    kway.evaluate(judged_by(model), tmp_path / "run/ema.safetensors", devices="cpu:1")
    with pytest.raises(
        kway.UsageError, match=r"not in the model .*; what it makes when it first runs comes with"
    ):
        kway.evaluate(judged_by(model), run.model.state_dict(), devices="cpu:1")


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("instance", [False, True])
def test_files_of_a_run_that_began_with_such_weights_fit_as_well(ranks, tmp_path, size, instance):
    trained(ranks, Fixed, 1, epochs=1, out=tmp_path / "first")
    job = judged_by(Fixed() if instance else Fixed, init=tmp_path / "first", validation=(X, Y))
    more = {"ranks": ranks, "epochs": 1, "devices": f"cpu:{size}", "echo": False}
    run = kway.train(job, out=tmp_path / "then", save_best="validation_loss", **more)
    expected = kway.evaluate(judged_by(Fixed), run.model, devices="cpu:1")
    for file in ("then", "then/best.safetensors"):
        assert kway.evaluate(judged_by(Fixed), tmp_path / file, devices="cpu:1") == expected


def test_a_loop_of_ones_own_saves_what_the_model_made_too(tmp_path):
    with kway.parallel(judged_by(Fixed)) as p:
        for batch in p.batches(0):
            p.step(batch)
        saved = p.save(tmp_path / "run")
    kway.evaluate(judged_by(Fixed), saved, devices="cpu:1")


def test_weights_of_another_model_make_nothing(ranks, tmp_path):
    trained(ranks, Fixed, 1, epochs=1, out=tmp_path / "run")
    other = nn.Sequential(nn.Linear(2, 3))
    with pytest.raises(kway.UsageError, match="missing"):
        kway.train(judged_by(other, init=tmp_path / "run"), devices="cpu:1", epochs=1)
    assert list(other.state_dict()) == ["0.weight", "0.bias"]
