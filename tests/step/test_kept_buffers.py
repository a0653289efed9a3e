"""Buffers over the pieces of a batch, those among them that a layer makes when it first runs."""

import gc
import weakref
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module

import kway
from kway.step.kept_buffers import SHARD, KeptBuffers

_DRAW = torch.Generator().manual_seed(0)
X, Y = torch.rand(22, 2, generator=_DRAW), torch.rand(22, 2, generator=_DRAW)


class Counts(nn.Module):
    """Counts its passes in buffers that it makes in the first one, and the output follows."""

    def __init__(self, late=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.late = nn.Linear(2, 2), late
        self.made, self.factor = False, None

    def forward(self, x):
        if float(x.detach().max()) < self.late:
            return self.layer(x)
        if not self.made:
            self.register_buffer("passes", torch.zeros(()))
            self.register_buffer("table", torch.full((2,), 0.5), persistent=False)
            del self.factor
            self.register_buffer("factor", torch.ones(()))
            self.made = True
        if self.training:
            self.passes += 1
            self.factor = self.factor * 0.9
        return self.layer(x) * (1 + 0.1 * torch.sin(self.passes)) + self.table * self.factor


def job_of(model=Counts, samples=22, **more):
    more = {"precision": "fp64", "batch_size": 10, **more}
    return kway.Job(
        model=model, loss=nn.MSELoss(), optimizer=partial(torch.optim.SGD, lr=0.1), data=(X[:samples], Y[:samples]),
        **more,
    )  # fmt: skip


def trained(ranks, job, size, **more):
    strategy = "data" if size > 1 else "single"
    return kway.train(
        job, devices=f"cpu:{size}", strategy=strategy, epochs=2, ranks=ranks, echo=False, **more
    )


@pytest.mark.parametrize("samples", [22, 3, 1])
def test_a_buffer_made_in_the_first_pass_moves_once_a_step_at_bits(ranks, samples):
    """Of 22 samples the last batch is 2, of 3 and 1 the first: some rank has no sample then."""
    found = []
    for size in (1, 2, 3):
        run = trained(ranks, job_of(samples=samples), size, exactness="bits", shards=4)
        assert float(run.model.passes) == run.record.steps
        assert not any("buffer" in notice for notice in run.record.notices)
        found.append((run.record.weights_sha256, float(run.model.factor)))
    assert len(set(found)) == 1


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("micro_batch", [1, 3])
def test_a_buffer_made_in_the_first_pass_moves_once_a_step_in_micro_batches(ranks, micro_batch, size):
    right = trained(ranks, job_of(), 1).model.state_dict()
    found = trained(ranks, job_of(micro_batch=micro_batch), size).model.state_dict()
    assert found.keys() == right.keys() == {"layer.weight", "layer.bias", "passes", "factor"}
    for name, expected in right.items():
        torch.testing.assert_close(found[name], expected, rtol=0, atol=1e-12, msg=name)


def test_a_buffer_made_in_the_first_pass_moves_once_a_step_in_compiled_code():
    job = kway.Job(
        model=Compiled, loss=nn.MSELoss(), optimizer=partial(torch.optim.SGD, lr=0.1), data=(X[:4], Y[:4]),
        batch_size=4,
    )  # fmt: skip
    run = kway.train(
        job, devices="cpu:1", epochs=2, exactness="bits", shards=2, step_kind="compiled", echo=False
    )
    assert run.record.step_kind == "compiled"
    assert float(run.model.passes) == 2


class Compiled(nn.Linear):
    """Makes its counter as ``Counts`` does, in code that torch.compile takes as a whole."""

    def __init__(self):
        super().__init__(2, 2)

    def forward(self, x):
        if not hasattr(self, "passes"):
            self.register_buffer("passes", torch.zeros(()))
        self.passes += 1
        return super().forward(x) * torch.sin(self.passes)


class Follows(nn.Linear):
    """Makes a buffer first, and lets it follow the samples."""

    def forward(self, x):
        if not hasattr(self, "seen"):
            self.register_buffer("seen", torch.zeros(2, dtype=x.dtype))
        self.seen += x.detach().mean(0)
        return super().forward(x)


def test_a_buffer_made_in_the_first_pass_must_not_follow_the_samples(ranks):
    for more in ({"exactness": "bits", "shards": 4}, {}):
        job = job_of(partial(Follows, 2, 2), micro_batch=None if more else 3)
        with pytest.raises(kway.RefusedError, match="buffer 'seen' depends on the samples"):
            trained(ranks, job, 1, **more)


def test_a_first_buffer_of_a_later_step_is_there_where_a_device_had_no_sample(ranks):
    """Rank 1 has no shard with a sample, ever."""
    x = torch.tensor([[0.0, 0.0], [1.0, 1.0]])
    later = replace(job_of(partial(Counts, late=0.5), batch_size=1, shuffle=False), data=(x, x))
    found = [trained(ranks, later, size, exactness="bits", shards=4) for size in (1, 2)]
    assert [float(run.model.passes) for run in found] == [2, 2]
    assert len({run.record.weights_sha256 for run in found}) == 1


def test_what_listens_for_new_buffers_is_never_taken_away_by_the_collector():
    """It would change the hooks while torch goes through them."""
    gc.collect()
    before = len(torch_module._global_buffer_registration_hooks)
    model = nn.Linear(2, 2)
    there, kept, gone = weakref.ref(model), *(KeptBuffers(model, [], SHARD, []) for _ in range(2))
    gone.close()
    assert len(torch_module._global_buffer_registration_hooks) == before + 1
    handle = kept._hook
    del kept, gone, model
    gc.collect()
    assert there() is None
    assert len(torch_module._global_buffer_registration_hooks) == before + 1
    handle.remove()


def test_what_listens_goes_with_its_job_and_not_with_the_collector(ranks):
    gc.collect()
    before = len(torch_module._global_buffer_registration_hooks)
    gc.disable()
    try:
        run = trained(ranks, job_of(), 1, exactness="bits", shards=2)
    finally:
        gc.enable()
    assert len(torch_module._global_buffer_registration_hooks) == before
    assert run.model is not None


class Grows(nn.Module):
    """A table that grows with the longest input, and one that is assigned where there was nothing."""

    def __init__(self):
        super().__init__()
        self.layer, self.length, self.done = nn.Linear(6, 3), 2, False
        self.register_buffer("table", torch.ones(2), persistent=False)
        self.register_buffer("mask", None)

    def forward(self, x):
        if x.shape[1] > self.length:
            self.length = x.shape[1]
            self.register_buffer("table", torch.linspace(1, 2, self.length), persistent=False)
        if not self.done:
            self.mask, self.done = torch.ones(x.shape[1]), True
        return self.layer(x * self.table * self.mask)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(
    ("more", "options"), [({"micro_batch": 2}, {}), ({}, {"exactness": "bits", "shards": 4})]
)
def test_a_table_that_grows_in_the_first_pass_stays_grown(ranks, size, more, options):
    draw = torch.Generator().manual_seed(0)
    job = kway.Job(
        model=Grows, loss=nn.CrossEntropyLoss(), optimizer=partial(torch.optim.SGD, lr=0.1), batch_size=8,
        data=(torch.randn(24, 6, generator=draw), torch.randint(3, (24,), generator=draw)),
    )  # fmt: skip
    run = partial(kway.train, strategy="data", epochs=1, echo=False, ranks=ranks)
    whole = run(job, devices="cpu:1").model.layer.weight
    found = run(replace(job, **more), devices=f"cpu:{size}", **options).model.layer.weight
    torch.testing.assert_close(found, whole, rtol=1e-5, atol=1e-6)


def test_a_job_is_judged_after_its_end_as_before():
    model = Counts()
    job = kway.Job(**{**vars(job_of(model)), "validation": (X, Y)})
    before = len(torch_module._global_buffer_registration_hooks)
    with kway.parallel(job, devices="cpu:1", exactness="bits", shards=2) as p:
        pass
    assert len(torch_module._global_buffer_registration_hooks) == before
    first = p.evaluate()
    assert model.factor is not None
    assert len(torch_module._global_buffer_registration_hooks) == before
    assert p.evaluate() == first


def test_an_opening_that_fails_leaves_nothing_that_listens(monkeypatch):
    def full(self):
        raise RuntimeError("out of memory")

    before = len(torch_module._global_buffer_registration_hooks)
    monkeypatch.setattr("kway.step.shards.ShardStep._lay_out", full)
    with pytest.raises(RuntimeError, match="out of memory"):
        kway.train(job_of(), devices="cpu:1", exactness="bits", shards=2, epochs=1, echo=False)
    assert len(torch_module._global_buffer_registration_hooks) == before
