"""What is left after training: running statistics, buffers and weights files, the same from every rank."""

from functools import partial

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import kway
from kway.data.order import split

SGD = partial(torch.optim.SGD, lr=0.1)


def own(output, _):
    return output.flatten(1).sum(1)


def job_of(model, x, **more):
    more = {"optimizer": SGD, "precision": "fp64", "shuffle": False, "batch_size": len(x), **more}
    return kway.Job(model=model, loss=more.pop("loss", own), data=(x, torch.zeros(len(x))), **more)


X = torch.tensor([[0.0], [2.0], [10.0], [14.0]], dtype=torch.float64)


def buffers(session, evaluated=False):
    for batch in session.batches(0):
        session.step(batch)
    session.engine.equalise()
    return {name: value.clone() for name, value in session.model.named_buffers()}


@pytest.mark.parametrize("size", [1, 2, 3])
def test_w15_running_statistics_are_those_of_the_global_batch(trained, looped, size, tmp_path):
    job = job_of(partial(nn.BatchNorm1d, 1), X)
    run = trained(job, size, out=tmp_path / "run")
    saved = load_file(tmp_path / "run" / "weights.safetensors")
    everywhere = [saved, dict(run.model.named_buffers()), *looped(job, buffers, size)]
    for state in everywhere:
        assert float(state["running_mean"]) == pytest.approx(0.65, rel=1e-14)  # not 0.1, not 1.2
        assert float(state["running_var"]) == pytest.approx(0.9 + 0.1 * 131 / 3, rel=1e-14)
        assert int(state["num_batches_tracked"]) == 1


def test_w15_loose_statistics_are_one_average_everywhere(trained):
    run = trained(job_of(partial(nn.BatchNorm1d, 1), X), 2, exactness="loose")
    assert float(run.model.running_mean) == pytest.approx(0.65, rel=1e-14)
    assert float(run.model.running_var) == pytest.approx((0.9 + 0.1 * 2 + 0.9 + 0.1 * 8) / 2, rel=1e-14)
    assert any("running_mean" in notice for notice in run.record.notices)


class Buffered(nn.Module):
    """Buffers of all kinds, changed in place and by assignment, from the samples that a rank sees."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(1))
        self.register_buffer("assigned", torch.zeros(2))
        self.register_buffer("placed", torch.zeros(()))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("flag", torch.zeros(2, dtype=torch.bool))
        self.register_buffer("wave", torch.zeros(2, dtype=torch.complex64))

    def forward(self, x):
        self.assigned = x.detach().max() * torch.ones(2, dtype=x.dtype)
        self.placed += x.detach().sum()
        self.count += len(x) + int(x[0, 0])
        self.flag = x.detach().max() > torch.tensor([1.0, 5.0])
        self.wave = x.detach().sum() * torch.tensor([1, 1j])
        return self.w * x


def test_w15_other_buffers_are_brought_to_one_value_and_it_is_said(looped, trained):
    first, second = looped(job_of(Buffered, X), buffers)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert first["assigned"].tolist() == [8.0, 8.0]  # the mean of 2 and 14
    assert float(first["placed"]) == 13.0
    assert int(first["count"]) == 2
    assert first["flag"].tolist() == [True, False]
    assert first["wave"].tolist() == [13, 13j]
    notices = trained(job_of(Buffered, X), 2).record.notices
    assert any("assigned, placed, count, flag, wave" in notice for notice in notices)


class Instances(nn.Module):
    """Running statistics of instances."""

    def __init__(self):
        super().__init__()
        self.norm = nn.InstanceNorm1d(1, track_running_stats=True)
        self.w = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return self.w * x + 0 * self.norm(x[:, None].expand(-1, 1, 2))[..., 0]


def normed(session):
    found = buffers(session)
    return float(session.model.w.grad), float(found["norm.running_mean"])


def test_what_the_guide_says_of_instance_norm(looped, trained):
    """The plain mean of what each device saw for its share."""
    x = torch.tensor([[0.0], [3.0], [9.0]], dtype=torch.float64)
    for gradient, mean in looped(job_of(Instances, x), normed):
        assert gradient == pytest.approx(4.0, rel=1e-14)
        assert mean == pytest.approx(0.1 * (1.5 + 9.0) / 2, rel=1e-14)  # of one device: 0.1 * 4
    run = trained(job_of(Instances, x), 2)
    assert any("norm.running_mean" in notice for notice in run.record.notices)
    for size in (1, 2):
        with pytest.raises(kway.RefusedError, match=r"buffer 'norm\.running_mean'"):
            trained(job_of(Instances, x), size, exactness="bits", shards=2)


class Unset(nn.Module):
    """A buffer of which no value is known yet, written in every step."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(1))
        self.register_buffer("last", torch.tensor([torch.nan, 1.0]))

    def forward(self, x):
        self.last += 1
        return self.w * x


@pytest.mark.parametrize("exactness", ["math", "bits"])
def test_w15_a_value_that_is_no_number_anywhere_is_the_same_everywhere(trained, exactness):
    run = trained(job_of(Unset, X), 2, exactness=exactness)
    assert run.model.last.isnan().tolist() == [True, False]
    assert not any("last" in notice for notice in run.record.notices)


@pytest.mark.parametrize(("samples", "size"), [(9, 4), (5, 2), (3, 2), (50, 4), (2, 3)])
def test_x07_shares_differ_by_one_sample_at_most(ranks, samples, size):
    x = torch.randn(samples, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    job = job_of(partial(nn.BatchNorm1d, 2), x)
    proof = kway.prove(job, devices=f"cpu:{size}", steps=1, ranks=ranks, echo=False)
    (row,) = proof.candidates
    total = samples - (samples % size == 0)
    assert row["shares"] == [split(total, size)]
    assert max(row["shares"][0]) - min(row["shares"][0]) <= 1
    assert row["equal"] in ("bits", "ulps"), row
    assert split(50, 8) == [7, 7, 6, 6, 6, 6, 6, 6]


def test_x07_batch_normalisation_of_one_value_says_where(trained):
    with pytest.raises(kway.KwayError, match=r"more than 1 value a channel.*rank \d") as caught:
        trained(job_of(partial(nn.BatchNorm1d, 2), torch.ones(1, 2)), 2)
    assert "use a larger batch" in str(caught.value)


SEVEN = torch.randn(7, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("size", [2, 3])
def test_x07_a_device_with_one_value_a_channel_is_named_at_loose(trained, size):
    """The last batch holds 3 samples: two devices share it as 2 + 1, three as 1 + 1 + 1."""
    data, batch_size = (SEVEN, 4) if size == 2 else (SEVEN[:3], 3)
    job = job_of(partial(nn.BatchNorm1d, 2), data, batch_size=batch_size)
    with pytest.raises(kway.RefusedError) as caught:
        trained(job, size, exactness="loose")
    said = str(caught.value)
    rank = "rank 1 of 2" if size == 2 else "rank "
    assert f"input (1, 2), on {rank}" in said
    assert "which holds 1 of the 3 samples of a batch" in said
    assert "another batch size or fewer devices or exactness math" in said
    assert trained(job, size).record.steps == (2 if size == 2 else 1)


def test_x07_loose_on_one_device_names_what_helps_there(trained):
    job = job_of(partial(nn.BatchNorm1d, 2), SEVEN[:3], micro_batch=1)
    with pytest.raises(kway.RefusedError, match="3 of the 3 samples of a batch in 3 micro-batches") as caught:
        trained(job, 1, exactness="loose", strategy="single")
    assert str(caught.value).endswith("use a larger micro_batch or another batch size")
    job = job_of(partial(nn.BatchNorm1d, 2), SEVEN, batch_size=6)
    with pytest.raises(kway.RefusedError, match=r"1 of the 1 samples of a batch: .*use another batch size$"):
        trained(job, 1, exactness="loose", strategy="single")


def test_x07_several_values_of_one_sample_are_enough(trained):
    pixels = torch.randn(3, 2, 2, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert trained(job_of(partial(nn.BatchNorm2d, 2), pixels), 3, exactness="loose").record.steps == 1


class Tied(nn.Module):
    """A user's own module called ``module``, tied weights, and a buffer."""

    def __init__(self):
        super().__init__()
        self.module = nn.Embedding(5, 4)
        self.out = nn.Linear(4, 5, bias=False)
        self.out.weight = self.module.weight
        self.norm = nn.BatchNorm1d(4)

    def forward(self, tokens):
        return self.out(self.norm(self.module(tokens)))


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("instance", [True, False])
def test_k01_the_weights_file_loads_into_a_bare_model(trained, size, instance, tmp_path):
    tokens = torch.tensor([0, 1, 2, 3, 4, 0, 1])
    model = Tied()
    job = kway.Job(
        model=model if instance else Tied,
        loss=nn.CrossEntropyLoss(),
        optimizer=SGD,
        data=(tokens, tokens.flip(0)),
        batch_size=7,
    )
    run = trained(job, size, epochs=3, out=tmp_path / "run")
    state = load_file(tmp_path / "run" / "weights.safetensors")
    bare = Tied()
    assert set(state) == set(bare.state_dict())
    bare.load_state_dict(state, strict=True)
    assert torch.equal(state["module.weight"], state["out.weight"])
    assert run.model.module.weight is run.model.out.weight
    assert sum(p.numel() for p in run.model.parameters()) == 28
    for name, value in run.model.state_dict().items():
        assert torch.equal(value, state[name]), name
    assert (run.model is model) == instance
    again = trained(
        kway.Job(**{**vars(job), "model": Tied, "init": tmp_path / "run" / "weights.safetensors"}), size
    )
    assert again.record.steps == 1


def test_k01_a_file_that_matches_nothing_is_refused(tmp_path):
    from safetensors.torch import save_file

    prefixed = {f"model.{name}": value for name, value in nn.Linear(2, 2).state_dict().items()}
    save_file(prefixed, tmp_path / "prefixed.safetensors")
    x = torch.ones(4, 2)
    job = job_of(partial(nn.Linear, 2, 2), x, init=tmp_path / "prefixed.safetensors")
    with pytest.raises(kway.UsageError, match=r"missing bias, weight; not in the model model\.bias"):
        kway.train(job, devices="cpu:1")
