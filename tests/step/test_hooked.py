"""Hooks on parameters: run where they get the gradient of the global batch, refused where they would get a part's."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

import kway

X = torch.randn(6, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.linspace(-1, 1, 6, dtype=torch.float64)[:, None]


def limited():
    model = nn.Linear(3, 1).double()
    model.weight.register_hook(lambda gradient: gradient.clamp(-0.02, 0.02))
    return model


def limited_after():
    def limit(parameter):
        parameter.grad.clamp_(-0.02, 0.02)

    model = nn.Linear(3, 1).double()
    model.weight.register_post_accumulate_grad_hook(limit)
    return model


def job_of(model, **more):
    more = {"optimizer": torch.optim.SGD, "batch_size": 6, "precision": "fp64", **more}
    return kway.Job(model=model, loss=nn.MSELoss(), data=(X, Y), **more)


@pytest.mark.parametrize("model", [limited, limited_after])
@pytest.mark.parametrize(
    ("size", "more", "options"),
    [(2, {}, {}), (1, {"micro_batch": 3}, {}), (1, {}, {"exactness": "bits", "shards": 2})],
    ids=["devices", "micro-batches", "shards"],
)
def test_a_hook_that_would_get_the_gradient_of_a_part_is_refused_before_anything_starts(
    model, size, more, options, leftovers
):
    for given in (model, model()):
        with pytest.raises(kway.RefusedError, match=r"'weight' has a hook on its gradient.*clip="):
            kway.train(job_of(given, **more), devices=f"cpu:{size}", epochs=1, echo=False, **options)
    assert not leftovers()


@pytest.mark.parametrize("model", [limited, limited_after])
def test_on_one_device_and_a_whole_batch_it_acts_as_in_plain_torch(model):
    torch.manual_seed(0)
    right = model()
    nn.functional.mse_loss(right(X), Y).backward()
    expected = right.weight.detach() - 1e-3 * right.weight.grad
    for more in ({}, {"micro_batch": 6}):
        own = kway.train(job_of(model, **more), devices="cpu:1", epochs=1, echo=False).model
        torch.testing.assert_close(own.weight.detach(), expected, rtol=0, atol=1e-14)
    assert right.weight.grad.abs().max() <= 0.02


def frozen():
    model = nn.Sequential(limited(), nn.Linear(1, 1).double())
    model[0].requires_grad_(False)
    return model


def evaluated(context):
    """What ranks that are there already give."""
    return kway.evaluate(job_of(limited), devices="auto", strategy="data")["loss"]


def test_a_hook_that_is_never_called_stands_in_nobodys_way(ranks):
    (alone,), spread = ranks.run(evaluated, size=1), ranks.run(evaluated, size=2)
    assert spread == pytest.approx([alone, alone], rel=1e-14)
    kway.train(job_of(frozen), devices="cpu:2", strategy="data", epochs=1, ranks=ranks, echo=False)


def noted(context):
    """What a hook sees of a step, and the gradient that there is then."""
    seen = []

    def one_number():
        model = nn.Linear(1, 1, bias=False).double()
        model.weight.register_hook(lambda gradient: seen.append(float(gradient)))
        return model

    data = torch.tensor([[0.0], [3.0], [9.0]], dtype=torch.float64), torch.zeros(3)
    job = replace(job_of(one_number, batch_size=3, shuffle=False), data=data, loss=lambda o, t: o[:, 0])
    with kway.parallel(job, devices="auto", strategy="data", exactness="loose") as session:
        for batch in session.batches(0):
            session.step(batch)
        return seen, float(session.model.weight.grad)


def test_at_loose_a_hook_sees_what_one_device_computed(ranks):
    assert ranks.run(noted) == [([pytest.approx(part)], pytest.approx(4.0)) for part in (1.0, 3.0)]


def test_one_that_is_linear_runs_at_loose(ranks):
    """A mask acts on the sum as on its parts."""

    def masked():
        model = nn.Linear(3, 1).double()
        model.weight.register_hook(lambda gradient: gradient * torch.tensor([1.0, 0.0, 1.0]))
        return model

    job = job_of(masked)
    right = kway.train(job, devices="cpu:1", epochs=1, echo=False).model
    for cut in (job, replace(job, micro_batch=2)):
        own = kway.train(
            cut, devices="cpu:2", strategy="data", epochs=1, exactness="loose", ranks=ranks, echo=False
        ).model
        torch.testing.assert_close(own.weight, right.weight, rtol=0, atol=1e-14)


class MaskedAtFirst(nn.Linear):
    """Its weight is masked until it removes the hook in its third step."""

    def __init__(self):
        super().__init__(3, 1, dtype=torch.float64)
        nn.init.constant_(self.weight, 0.5)
        nn.init.zeros_(self.bias)
        self.steps = 0
        self.mask = self.weight.register_hook(lambda gradient: gradient * torch.tensor([1.0, 0.0, 1.0]))

    def forward(self, x):
        self.steps += self.training
        if self.steps == 3:
            self.mask.remove()
        return super().forward(x)


def test_a_hook_that_the_model_removes_is_gone_on_all_devices(ranks):
    right = kway.train(job_of(MaskedAtFirst), devices="cpu:1", epochs=4, echo=False).model
    for options in ({"strategy": "data", "ranks": ranks}, {"strategy": "threads"}):
        own = kway.train(
            job_of(MaskedAtFirst()), devices="cpu:2", exactness="loose", epochs=4, echo=False, **options
        )
        torch.testing.assert_close(own.model.weight, right.weight, rtol=0, atol=1e-14)


class Thawed(nn.Linear):
    """It trains its weight, on which there is a hook, from its third step on."""

    def __init__(self):
        super().__init__(3, 1, dtype=torch.float64)
        nn.init.constant_(self.weight, 0.5)
        nn.init.zeros_(self.bias)
        self.steps = 0
        self.weight.register_hook(lambda gradient: gradient * 3)
        self.weight.requires_grad_(False)

    def forward(self, x):
        self.steps += self.training
        if self.steps == 3:
            self.weight.requires_grad_()
        return super().forward(x)


def test_a_hook_on_what_is_trained_later_is_refused_then_and_acts_at_loose(ranks):
    right = kway.train(job_of(Thawed), devices="cpu:1", epochs=4, echo=False).model
    assert not right.weight.eq(0.5).any()
    options = {"devices": "cpu:2", "epochs": 4, "echo": False}
    for where in ({"strategy": "data", "ranks": ranks}, {"strategy": "threads"}):
        own = kway.train(job_of(Thawed()), exactness="loose", **options, **where)
        torch.testing.assert_close(own.model.weight, right.weight, rtol=0, atol=1e-14)
        with pytest.raises(kway.RefusedError, match="'weight' has a hook on its gradient"):
            kway.train(job_of(Thawed()), **options, **where)


def hooked_later(context):
    job = job_of(partial(nn.Linear, 3, 1), batch_size=3)
    with kway.parallel(job, devices="auto", strategy="data") as session:
        for number, batch in enumerate(session.batches(0)):
            if number == 1:
                session.model.weight.register_hook(lambda gradient: gradient.clamp(-0.02, 0.02))
            session.step(batch)


def test_a_hook_that_a_loop_hangs_later_is_refused(ranks):
    with pytest.raises(kway.RefusedError, match="'weight' has a hook on its gradient"):
        ranks.run(hooked_later)


HALVES = {
    "register_full_backward_hook": lambda module, given, own: (given[0] / 2,),
    "register_full_backward_pre_hook": lambda module, own: (own[0] / 2,),
}


def layered(kind, scripted=False):
    model = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 1)).double()
    if scripted:
        model.append(torch.jit.script(nn.Identity()))
    if kind is not None:
        for layer in model[1:]:
            getattr(layer, kind)(HALVES[kind])
    return model


def said_of_layers(model, size, ranks, **more):
    options = {name: more.pop(name) for name in ("exactness", "shards") if name in more}
    options |= {"strategy": "data", "ranks": ranks} if size > 1 else {}
    run = kway.train(job_of(model, **more), devices=f"cpu:{size}", epochs=1, echo=False, **options)
    return [line for line in run.record.notices if "hook on backward" in line], run.model.state_dict()


@pytest.mark.parametrize("kind", HALVES)
@pytest.mark.parametrize(
    ("size", "more", "cut"),
    [
        (2, {}, "over 2 devices"),
        (1, {"micro_batch": 3}, "by micro_batch=3"),
        (1, {"exactness": "bits", "shards": 2}, "into 2 shards"),
    ],
    ids=["devices", "micro-batches", "shards"],
)
def test_a_hook_on_a_layers_backward_is_named_where_it_gets_a_part_and_one_that_is_linear_is_right(
    ranks, kind, size, more, cut
):
    none, right = said_of_layers(partial(layered, kind), 1, ranks)
    assert none == []
    (line,), own = said_of_layers(partial(layered, kind), size, ranks, **more)
    assert line.startswith(
        f"layer '1' (Tanh) and 1 other layer: a hook on backward, where the batch is cut {cut}, "
    )
    for name, value in right.items():
        torch.testing.assert_close(own[name], value, rtol=0, atol=1e-14)


def test_without_such_hooks_nothing_is_said(ranks):
    for size, more in ((2, {}), (1, {"exactness": "bits"})):
        assert said_of_layers(partial(layered, None, scripted=size == 1), size, ranks, **more)[0] == []


def test_a_loop_is_told_of_it_when_it_begins(capfd):
    job = job_of(partial(layered, "register_full_backward_hook"), micro_batch=2)
    with kway.parallel(job, devices="cpu:1"):
        assert "kway: layer '1' (Tanh) and 1 other layer: a hook on backward" in capfd.readouterr().err
    with kway.parallel(replace(job, micro_batch=None), devices="cpu:1"):
        assert "hook on backward" not in capfd.readouterr().err
