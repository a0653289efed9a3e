"""Copies of models that ``copy.deepcopy`` alone refuses."""

import copy
import threading
import warnings
from dataclasses import replace
from functools import cache, partial

import pytest
import torch
from torch import nn

import kway
from kway.errors import UsageError
from kway.training.on_a_copy import copied

X, Y = torch.randn(64, 8, generator=torch.Generator().manual_seed(0)), torch.arange(64) % 3


def older(norm):
    def net():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            return nn.Sequential(norm(nn.Linear(8, 4)), nn.Linear(4, 3))

    return net


class Locked(nn.Module):
    """Cannot be copied; it can be made again."""

    def __init__(self):
        super().__init__()
        self.last, self.lock = nn.Linear(8, 3), threading.Lock()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        with self.lock:
            return self.last(x)


class Knows:
    """A penalty that knows a layer of the model."""

    def __init__(self, model):
        self.layer = model.last

    def __call__(self, model):
        return self.layer.weight.square().sum()


def job(model, **more):
    sgd = partial(torch.optim.SGD, lr=0.1)
    return kway.Job(model, nn.CrossEntropyLoss(), sgd, (X, Y), batch_size=16, **more)


@pytest.mark.parametrize("norm", [nn.utils.weight_norm, nn.utils.spectral_norm])
@pytest.mark.parametrize("made", [True, False])
def test_layers_that_hold_what_they_computed_are_profiled_tried_and_proved(norm, made):
    model = older(norm)() if made else older(norm)
    if made:
        model(X).sum().backward()
        with pytest.raises(RuntimeError, match="created explicitly"):
            copy.deepcopy(model)
    before = {} if not made else {name: each.clone() for name, each in model.state_dict().items()}
    named = job(model, name="net")
    assert kway.profile(named, devices="cpu:1", seconds=0.1).timings
    # On a busy machine it may be left for want of time.
    assert "copied" not in kway.tune(named, devices="cpu:1", seconds=0.1, refresh=True).why
    assert kway.prove(named, devices="cpu:1", strategy="single", steps=2).verdict == "pass"
    assert all(torch.equal(each, model.state_dict()[name]) for name, each in before.items())


def test_replicas_that_are_threads_hold_what_layers_compute():
    model = older(nn.utils.weight_norm)
    alone, spread = (
        kway.train(job(model), devices=f"cpu:{size}", strategy=strategy, epochs=1, tune=False, echo=False)
        for size, strategy in ((1, "single"), (2, "threads=2"))
    )
    for name, each in alone.model.state_dict().items():
        torch.testing.assert_close(spread.model.state_dict()[name], each)


def test_what_cannot_be_copied_is_made_again_as_it_was_and_is_now():
    torch.manual_seed(1)
    model = Locked().double().eval()
    model.last.bias.requires_grad_(False)
    model.seen.fill_(3.0)
    own = job(Locked, penalty=Knows(model))
    new, beside = copied(model, own)
    assert new.lock is not model.lock
    assert not new.training
    assert beside["penalty"].layer is new.last
    for name, each in [*model.named_parameters(), *model.named_buffers()]:
        other = new.get_parameter(name) if name != "seen" else new.seen
        assert torch.equal(each, other)
        assert each.dtype == other.dtype
        assert each is not other
        assert each.requires_grad == other.requires_grad


def test_a_model_that_cannot_be_copied_nor_made_again_is_refused():
    assert kway.profile(job(Locked), devices="cpu:1", seconds=0.1).timings
    assert kway.prove(job(Locked), devices="cpu:1", strategy="single", steps=2).verdict == "pass"
    said = r"cannot be copied \(TypeError.*let the job make the model"
    with pytest.raises(UsageError, match=said):
        kway.profile(job(Locked()), devices="cpu:1", seconds=0.1)
    with pytest.raises(UsageError, match=said):
        kway.prove(job(Locked()), devices="cpu:1", strategy="single", steps=2)


class Guarded:
    """A penalty that cannot be copied, and counts."""

    def __init__(self):
        self.lock, self.calls = threading.Lock(), 0

    def __call__(self, model):
        self.calls += 1
        return 0 * next(model.parameters()).sum()


def test_what_a_proof_cannot_copy_beside_the_model_is_the_users_own_and_named():
    guarded, model = Guarded(), nn.Linear(8, 3)
    where = {"devices": "cpu:1", "strategy": "single", "steps": 2}
    found = kway.prove(job(model, penalty=guarded), **where)
    assert found.verdict == "pass"
    (line,) = [each for each in found.notices if "not copied" in each]
    assert "the job's loss, penalty (TypeError: cannot pickle '_thread.lock' object)" in line
    assert guarded.calls > 0
    assert not any("not copied" in each for each in kway.prove(job(model), **where).notices)


class Keeping(nn.Module):
    """Hands on what a hook in a list keeps, and finds its layers through a cache."""

    def __init__(self):
        super().__init__()
        self.first, self.last, self.kept = nn.Linear(8, 4), nn.Linear(4, 3), None
        self.hooks = [lambda module, args, out: setattr(self, "kept", out)]
        self.first.register_forward_hook(self.hooks[0])
        self.layer = cache(self.named)

    def named(self, name):
        return getattr(self, name)

    def forward(self, x):
        self.layer("first")(x)
        return self.layer("last")(self.kept.relu())


@pytest.mark.parametrize("made", [True, False])
def test_what_is_tried_on_a_copy_writes_nothing_to_the_users_own(made):
    model = Keeping()
    own = job(model if made else Keeping, name="net", precision="fp64")
    assert kway.profile(own, devices="cpu:1", seconds=0.1).timings
    assert "copied" not in kway.tune(own, devices="cpu:1", seconds=0.1, refresh=True).why
    assert kway.prove(own, devices="cpu:1", strategy="single", steps=2).verdict == "pass"
    assert model.kept is None
    assert model.layer.cache_info().currsize == 0


def test_functions_beside_a_model_know_its_copy():
    model, seen = Keeping(), []

    def loss(output, target):
        seen.append(model.kept)
        return nn.functional.cross_entropy(output, target)

    own = replace(job(model, penalty=lambda _: seen), loss=loss)
    new, beside = copied(model, own)
    beside["loss"](new(X), Y)
    assert beside["penalty"](new)[0] is new.kept
    assert model.kept is None
    assert seen == []


def test_what_was_made_again_shares_with_a_loss_what_both_know():
    kept = {}

    def make():
        model = Locked()
        model.last.register_forward_hook(lambda module, args, out: kept.__setitem__("out", out))
        return model

    model = make()
    own = job(make, penalty=lambda _: (kept, model.last))
    new, beside = copied(model, own)
    out = new(X)
    assert beside["penalty"](new)[0]["out"] is out
    assert beside["penalty"](new)[1] is new.last


def test_hooks_of_parameters_act_in_what_is_tried():
    def masked():
        model = nn.Linear(8, 3)
        model.weight.register_hook(lambda gradient: gradient * (torch.arange(8) > 3))
        return model

    for model in (masked, masked()):
        alone = job(model, name="net")
        assert kway.prove(alone, devices="cpu:1", strategy="single", steps=2).verdict == "pass"
        # Of several devices it is refused, as a run is.
        spread = kway.prove(alone, devices="cpu:2", strategy="threads", steps=2)
        assert [row["equal"] for row in spread.candidates] == ["refused"]
