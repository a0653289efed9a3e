"""Tables whose gradients are sparse: only rows that somebody looked up may move, on any number of devices."""

from functools import partial

import pytest
import torch
from torch import nn

import kway

SGD = partial(torch.optim.SGD, lr=1.0)
ADAM = partial(torch.optim.SparseAdam, lr=0.1)


class Table(nn.Module):
    """Values of the tokens that were looked up."""

    def __init__(self, padding_idx=0, width=1):
        super().__init__()
        self.table = nn.Embedding(4, width, sparse=True, padding_idx=padding_idx)
        with torch.no_grad():
            self.table.weight.copy_(torch.arange(4.0 * width).view(4, width) / 7)

    def forward(self, tokens):
        return self.table(tokens)


def summed(output, _):
    """A sum for each sample: with one sample a rank, the mean over samples is the mean over ranks."""
    return output.flatten(1).sum(1)


def job_of(tokens, **more):
    more = {"model": Table, "loss": summed, "optimizer": SGD, "batch_size": len(tokens), **more}
    return kway.Job(data=(tokens, torch.zeros(len(tokens))), shuffle=False, precision="fp64", **more)


PADDED = torch.tensor([[0, 0, 0], [1, 1, 1]]), 0, [0, 1.5, 0, 0]
PLAIN = torch.tensor([[1, 3], [2, 3]]), None, [0, 0.5, 0.5, 1]
START = Table().table.weight.detach().double()
LEVELS = [("math", 1), ("math", 3), ("bits", 1), ("bits", 3), ("loose", 2)]


@pytest.mark.parametrize(("level", "size"), LEVELS)
@pytest.mark.parametrize(("tokens", "padding", "gradient"), [PADDED, PLAIN])
def test_w32_a_rank_with_nothing_to_send(trained, tokens, padding, gradient, level, size):
    run = trained(job_of(tokens, model=partial(Table, padding)), size, exactness=level, shards=3)
    weight = run.model.table.weight.detach()
    right = START - torch.tensor(gradient, dtype=torch.float64).unsqueeze(1)
    torch.testing.assert_close(weight, right, rtol=0, atol=1e-15)
    for row, value in enumerate(gradient):
        assert torch.equal(weight[row], START[row]) == (value == 0)


def test_w32_a_mean_over_all_lookups(trained):
    def every(output, _):
        return output

    run = trained(job_of(PADDED[0], loss=every), 2)
    moved = START - run.model.table.weight.detach()
    torch.testing.assert_close(moved.squeeze(1), torch.tensor([0, 0.5, 0, 0], dtype=torch.float64))


def session_of(session):
    for batch in session.batches(0):
        session.step(batch)
    (parameter,) = session.model.parameters()
    state = session.engine.optimizer.state[parameter]
    return parameter.grad, parameter.detach().clone(), {k: torch.as_tensor(v) for k, v in state.items()}


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("micro_batch", [1, None])
def test_w32_sparse_adam_touches_only_the_rows_that_were_looked_up(looped, size, micro_batch):
    tokens = torch.tensor([[1, 3], [2, 3], [1, 1], [2, 2], [0, 0], [3, 0]])
    job = job_of(tokens, optimizer=ADAM, batch_size=2, micro_batch=micro_batch)
    model = Table().double()
    optimizer = ADAM(model.parameters())
    for pair in tokens.split(2):
        optimizer.zero_grad()
        summed(model(pair), None).mean().backward()
        optimizer.step()
    for grad, weight, state in looped(job, session_of, size):
        assert grad.is_sparse
        assert grad.coalesce().indices()[0].tolist() == [3]  # of the last batch: 0 is padding
        torch.testing.assert_close(weight, model.table.weight.detach(), rtol=0, atol=1e-12)
        assert torch.equal(weight[0], START[0])
        assert int(state["step"]) == 3
        for name in ("exp_avg", "exp_avg_sq"):
            expected = optimizer.state[model.table.weight][name]
            torch.testing.assert_close(state[name], expected, rtol=0, atol=1e-12)


class Words(nn.Module):
    """A table, a bag and a dense layer; two samples use no bag, and a device with no other has no gradient for it."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(11, 3, sparse=True)
        self.bag = nn.EmbeddingBag(7, 3, mode="sum", sparse=True)
        self.out = nn.Linear(3, 2)

    def forward(self, tokens):
        found = self.table(tokens).sum(1)
        small = tokens.amax(1, keepdim=True) < 7
        if small.any():
            found = found + small * self.bag(tokens.clamp(max=6))
        return self.out(found)


MOMENTUM = partial(torch.optim.SGD, lr=0.05, momentum=0.9)


G = torch.Generator().manual_seed(0)
TOKENS = torch.randint(0, 7, (13, 4), generator=G)
TOKENS[5, 0], TOKENS[12, 1] = 10, 8
Y = torch.randn(13, 2, generator=G)


def words_job(**more):
    more = {"model": Words, "loss": nn.MSELoss(), "optimizer": MOMENTUM, "batch_size": 6, **more}
    return kway.Job(data=(TOKENS, Y), **{"precision": "fp64", **more})


@pytest.mark.parametrize("clip", [None, 0.05, ("value", 0.01)])
@pytest.mark.parametrize(("level", "micro_batch"), [("math", None), ("math", 2), ("bits", None)])
def test_w32_the_proof_holds_clipping_and_micro_batches_included(ranks, level, clip, micro_batch):
    proof = kway.prove(
        words_job(clip=clip, micro_batch=micro_batch),
        devices="1,2,4",
        exactness=level,
        shards=4,
        own_optimizer=True,
        ranks=ranks,
        echo=False,
    )
    assert proof.verdict == "pass", [(row["equal"], row["reason"]) for row in proof.candidates]


@pytest.mark.parametrize("level", ["math", "bits"])
def test_w32_the_proof_holds_for_sparse_adam(ranks, level):
    job = job_of(TOKENS.remainder(4), optimizer=ADAM, batch_size=5, model=partial(Table, None, 3))
    proof = kway.prove(
        job, devices="1,2,3", exactness=level, shards=3, own_optimizer=True, ranks=ranks, echo=False
    )
    assert proof.verdict == "pass", [(row["equal"], row["reason"]) for row in proof.candidates]


def test_w32_bits_are_those_of_one_device(ranks):
    def digest(context, job):
        run = kway.train(job, devices="cpu:1", exactness="bits", shards=4, epochs=2)
        return run.record.weights_sha256

    for job in (words_job(precision="fp32"), words_job(precision="fp32", clip=0.05)):
        alone = ranks.run(digest, job, size=1)[0]
        for size in (2, 3, 4):
            run = kway.train(
                job, devices=f"cpu:{size}", exactness="bits", shards=4, epochs=2, ranks=ranks, echo=False
            )
            assert run.record.weights_sha256 == alone


class Tied(nn.Module):
    """One table for input and output: sparse and dense gradients add up to a dense one."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(7, 3, sparse=True)

    def forward(self, tokens):
        return self.table(tokens).mean(1) @ self.table.weight.T


@pytest.mark.parametrize("level", ["math", "bits"])
def test_w32_a_table_that_is_used_in_another_way_too_has_a_dense_gradient(ranks, level):
    job = kway.Job(
        model=Tied, loss=nn.CrossEntropyLoss(), optimizer=SGD, batch_size=6,
        data=(TOKENS.remainder(7), TOKENS[:, 0].remainder(7)),
    )  # fmt: skip
    proof = kway.prove(job, devices="1,2,3", exactness=level, shards=3, ranks=ranks, echo=False)
    assert proof.verdict == "pass", [(row["equal"], row["reason"]) for row in proof.candidates]


class Functional(nn.Module):
    """Looks up with torch's function: nothing announces a sparse gradient."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(START.clone())

    def forward(self, tokens):
        return nn.functional.embedding(tokens, self.weight, sparse=True)


@pytest.mark.parametrize(("level", "size"), LEVELS)
def test_w32_a_sparse_gradient_that_nobody_announced_counts_too(trained, level, size):
    run = trained(job_of(PLAIN[0], model=Functional), size, exactness=level, shards=3)
    moved = (START - run.model.weight.detach()).squeeze(1)
    torch.testing.assert_close(moved, torch.tensor(PLAIN[2], dtype=torch.float64), rtol=0, atol=1e-15)


@pytest.mark.parametrize("level", ["math", "bits", "loose"])
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_a_table_that_shortens_its_rows_is_refused_on_several_devices(ranks, trained, kind, level):
    job = job_of(PLAIN[0], model=lambda: nn.Sequential(kind(4, 1, max_norm=0.5)))
    with pytest.raises(kway.RefusedError, match=r"embedding '0' with max_norm=0\.5"):
        trained(job, 2, exactness=level)
    assert trained(job, 1, exactness=level, strategy="single").record.steps == 1


def test_clipping_counts_a_row_that_comes_several_times_with_its_sum(trained):
    # The gradient is [0, 3, 4, 0]: row 1 comes three times, row 2 four times.
    tokens = torch.tensor([[1, 1, 1, 2, 2, 2, 2]])
    run = trained(job_of(tokens, clip=1.0), 1, strategy="single")
    moved = (START - run.model.table.weight.detach()).squeeze(1)
    torch.testing.assert_close(moved, torch.tensor([0, 0.6, 0.8, 0], dtype=torch.float64), rtol=1e-6, atol=0)
