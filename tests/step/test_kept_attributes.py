"""Plain attributes over the pieces of a batch: they move once a step, on every number of devices."""

from enum import Enum
from functools import partial

import pytest
import torch
from torch import nn

import kway
from kway.step.kept_attributes import KeptAttributes
from kway.step.plain_attributes import Noted

_DRAW = torch.Generator().manual_seed(0)
# The last batch has one sample: fewer than there are devices.
X = torch.rand(21, 1, generator=_DRAW, dtype=torch.float64)
Y = 0.5 * X + 0.1
LR, BATCH, EPOCHS = 0.1, 10, 2


class Phase(Enum):
    WARM, HOT = 1, 2


def factor(step):
    """What the output of ``Counts`` is multiplied by in its forward pass number ``step``, from 1."""
    factor = 1 + step / 10
    factor *= -1 if step % 2 else 0.5
    factor *= 0.9**step
    factor *= 2 if step >= 3 else 1
    return factor * (1 + 0.01 * step)


class Counts(nn.Module):
    """One weight, and a count of each kind that the output follows, one of them made in the first pass."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.full((1,), 0.3))
        self.n, self.odd, self.rate, self.phase, self.text = 0, False, 1.0, Phase.WARM, ""
        self.nothing = None

    def forward(self, x):
        self.n += 1
        self.odd = not self.odd
        self.rate *= 0.9
        self.phase = Phase.HOT if self.n >= 3 else Phase.WARM
        self.text += "."
        self.nothing = True if self.nothing is None else None
        if not hasattr(self, "late"):
            self.late = 0
        self.late += 1
        # No assert: pytest's would be what threads share.
        if (self.nothing is None) is self.odd or len(self.text) != self.n:
            raise ValueError("not as many passes as the others count")
        scale = (1 + self.n / 10) * (-1 if self.odd else 0.5) * self.rate
        return x * self.w * (scale * self.phase.value * (1 + 0.01 * self.late))


def job_of(model=Counts, **more):
    return kway.Job(**{
        "model": model, "loss": nn.MSELoss(), "optimizer": partial(torch.optim.SGD, lr=LR), "data": (X, Y),
        "batch_size": BATCH, "precision": "fp64", "shuffle": False, **more,
    })  # fmt: skip


def trained(ranks, job, size, strategy="data", **more):
    strategy = strategy if size > 1 else "single"
    return kway.train(
        job, devices=f"cpu:{size}", strategy=strategy, echo=False, ranks=ranks, **{"epochs": EPOCHS, **more}
    )


def by_hand():
    """Plain SGD on the mean over whole batches, which a forward pass counts once."""
    w, step = torch.full((1,), 0.3).double(), 0
    for _ in range(EPOCHS):
        for x, y in zip(X.split(BATCH), Y.split(BATCH), strict=True):
            step += 1
            scaled = x * factor(step)
            w = w - LR * (2 * (scaled * w - y) * scaled).mean()
    return w


def test_counts_move_once_a_step_at_bits(ranks):
    found = set()
    for size, strategy in [(1, "data"), (2, "data"), (3, "data"), (2, "threads"), (3, "threads")]:
        run = trained(ranks, job_of(), size, strategy, exactness="bits", shards=4)
        torch.testing.assert_close(run.model.w.detach(), by_hand(), rtol=0, atol=1e-12)
        assert not any("attribute" in notice for notice in run.record.notices)
        found.add(run.record.weights_sha256)
        if size == 1:
            assert (run.model.n, run.model.late, run.model.phase) == (6, 6, Phase.HOT)
    assert len(found) == 1


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("micro_batch", [None, 4])
def test_counts_move_once_a_step_in_micro_batches(ranks, micro_batch, size):
    run = trained(ranks, job_of(micro_batch=micro_batch), size)
    torch.testing.assert_close(run.model.w.detach(), by_hand(), rtol=0, atol=1e-12)


def test_counts_in_evaluation_move_once_a_batch_at_bits(ranks):
    found = set()
    for size in (1, 2):
        run = trained(ranks, job_of(validation=(X, Y)), size, exactness="bits", shards=4)
        found.add((run.record.weights_sha256, str([row["validation_loss"] for row in run.record.epochs])))
    assert len(found) == 1


@pytest.mark.parametrize("exactness", ["bits", "math"])
def test_a_model_that_counts_passes_a_proof(ranks, exactness):
    proof = kway.prove(
        job_of(), devices="1,2", steps=3, exactness=exactness, shards=2, ranks=ranks, echo=False
    )
    assert proof.verdict == "pass", proof.candidates


class Follows(nn.Linear):
    """Keeps a figure of the samples."""

    def forward(self, x):
        self.last, self.aux = x.mean().item(), super().forward(x).square().mean()
        return super().forward(x)


def test_what_follows_the_samples_is_said_once_and_not_refused(ranks):
    job = job_of(partial(Follows, 1, 1))
    run = trained(ranks, job, 1, exactness="bits", shards=4)
    said = [
        notice
        for notice in run.record.notices
        if "'last' of Follows follows the samples of a shard" in notice
    ]
    assert len(said) == 1
    # Of the first shard of the last batch, which has one sample.
    assert run.model.last == X[-1].item()


class Freezes(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.n = nn.Linear(1, 1), nn.Linear(1, 1), 0

    def forward(self, x):
        self.n += 1
        if self.n == 3:
            self.a.requires_grad_(False)
        return self.a(x) + self.b(x)


@pytest.mark.parametrize("size", [1, 2])
def test_a_parameter_that_a_forward_pass_freezes_is_refused_at_bits(ranks, size):
    with pytest.raises(kway.KwayError, match=r"that was trained before the step is frozen after it"):
        trained(ranks, job_of(Freezes), size, exactness="bits", shards=4)


class Cached(nn.Module):
    """A table as long as the longest input so far, which is no buffer."""

    def __init__(self):
        super().__init__()
        self.length, self.table, self.other = 0, None, None

    def forward(self, x):
        if len(x) > self.length:
            self.length, self.table = len(x), torch.arange(len(x))
        self.other = x
        return x + self.table[: len(x)]


def test_a_table_stays_with_its_length():
    model, kept = Cached(), KeptAttributes("shard", [])
    kept.begin([model])
    for length in (20, 10):
        model(torch.ones(length))
        kept.end_of_piece()
        assert (model.length, model.table) == (0, None)
    kept.end_of_step()
    assert (model.length, len(model.table)) == (20, 20)
    kept.begin([model])
    table = model.table
    model(torch.ones(15))
    kept.end_of_piece()
    assert model.table is table
    # Nothing plain has moved: what a pass keeps beside is left as it is.
    assert len(model.other) == 15


def test_what_became_a_buffer_stays_one():
    class Makes(nn.Module):
        def __init__(self):
            super().__init__()
            self.n, self.table = 0, None

        def forward(self):
            self.n += 1
            del self.table
            self.register_buffer("table", torch.ones(1))

    model, kept = Makes(), KeptAttributes("shard", [])
    kept.begin([model])
    for _ in range(2):
        model()
        kept.end_of_piece()
    kept.end_of_step()
    assert model.n == 1
    assert model.table is model._buffers["table"]


def test_what_was_deleted_with_a_flag_comes_back_with_it():
    class Frees(nn.Module):
        def __init__(self):
            super().__init__()
            self.freed, self.table = False, torch.ones(1)

        def forward(self):
            if not self.freed:
                self.freed = bool(self.table.sum())
                del self.table

    model, kept = Frees(), KeptAttributes("shard", [])
    kept.begin([model])
    for _ in range(2):
        model()
        kept.end_of_piece()
    kept.end_of_step()
    assert model.freed
    assert not hasattr(model, "table")


def test_one_attribute_for_another_is_a_change():
    model = Cached()
    noted = Noted(model)
    del model.other
    model.n = 1
    assert not noted.unchanged()


class FollowsWrongly(Follows):
    """Its output is of the samples before."""

    def forward(self, x):
        before = getattr(self, "last", 0.0)
        return super().forward(x) * (1 + before)


def test_attributes_do_not_blame_the_loss(ranks):
    job = job_of(partial(FollowsWrongly, 1, 1))
    proof = kway.prove(job, devices="1,2", steps=3, exactness="bits", shards=4, ranks=ranks, echo=False)
    assert proof.verdict == "fail"
    assert "'last' of FollowsWrongly follows the samples" in str(proof)
    assert "the loss is the likely cause" not in str(proof)


class Saves(nn.Module):
    """Saves its count by itself; the one of its layer, too."""

    def __init__(self):
        super().__init__()
        self.inner = Counts()

    def forward(self, x):
        return self.inner(x)

    def get_extra_state(self):
        return {"n": self.inner.n}

    def set_extra_state(self, state):
        self.inner.n = state["n"]


def quiet():
    return nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Dropout(0.1), nn.Linear(4, 1))


def about_attributes(lines):
    return [line for line in lines if "attributes of the model have changed" in line]


def test_a_run_that_saves_says_once_which_attributes_no_checkpoint_holds(ranks, tmp_path):
    first = trained(ranks, job_of(), 2, out=tmp_path / "first", checkpoint_every="2steps")
    (line,) = about_attributes(first.record.notices)
    assert "'n' of Counts" in line
    on = trained(ranks, job_of(), 1, out=tmp_path / "on", resume=tmp_path / "first", epochs=3)
    assert about_attributes(on.record.notices) == [line]
    more = {"checkpoint_every": "2steps", "epochs": 1}
    for name, model in [("quiet", quiet), ("saves", Saves)]:
        run = trained(ranks, job_of(model, data=(X[:20], Y[:20])), 1, out=tmp_path / name, **more)
        assert not about_attributes(run.record.notices)
    assert not about_attributes(trained(ranks, job_of(), 1).record.notices)


def test_an_own_loop_says_it_once(tmp_path, capsys):
    with kway.parallel(job_of(), devices="cpu:1") as p:
        p.checkpoint(tmp_path / "there", 0)
        assert not about_attributes(capsys.readouterr().err.splitlines())
        for _ in range(2):
            for batch in p.batches(0):
                p.step(batch)
            p.checkpoint(tmp_path / "there", 1)
    assert len(about_attributes(capsys.readouterr().err.splitlines())) == 1


class Flagged(nn.Module):
    """Sets weights from the first samples that it sees, as layers of flows do, and a flag that says so."""

    def __init__(self):
        super().__init__()
        self.scale, self.last, self.ready = (
            nn.Parameter(torch.ones(4).double()),
            nn.Linear(4, 1).double(),
            False,
        )

    def forward(self, x):
        if not self.ready:
            with torch.no_grad():
                self.scale.copy_(1 / x.std(0))
            self.ready = True
        return self.last(x * self.scale)


class Bank(nn.Module):
    """Writes what it sees into a table, row by row."""

    def __init__(self):
        super().__init__()
        self.last, self.rows, self.at = nn.Linear(4, 1).double(), torch.zeros(8, 4).double(), 0

    def forward(self, x):
        self.rows[self.at : self.at + len(x)] = x.detach()
        self.at = (self.at + len(x)) % 8
        return self.last(x + self.rows.mean(0))


@pytest.mark.parametrize("kind", [Flagged, Bank])
def test_what_goes_with_a_tensor_that_is_written_stays_with_it(kind):
    """As with gradients that plain torch accumulates: such a tensor cannot be taken back."""
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(16, 4, generator=draw).double(), torch.randn(16, 1, generator=draw).double()

    def made():
        torch.manual_seed(1)
        return kind()

    model = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for first in (0, 8):
        optimizer.zero_grad()
        for piece in (first, first + 4):
            (nn.functional.mse_loss(model(x[piece : piece + 4]), y[piece : piece + 4]) / 2).backward()
        optimizer.step()
    job = kway.Job(
        model=made,
        loss=nn.MSELoss(),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        data=(x, y),
        batch_size=8,
        micro_batch=4,
        shuffle=False,
    )
    got = kway.train(job, devices="cpu:1", epochs=1, echo=False).model
    torch.testing.assert_close(got.last.weight, model.last.weight, rtol=0, atol=1e-14)


class Caching(nn.Module):
    """Keeps a table by its length, and how often it was asked."""

    def __init__(self, counts):
        super().__init__()
        self.last, self.length, self.made, self.counts, self.asked = nn.Linear(4, 1), 0, False, counts, 0

    def forward(self, x):
        if self.length < 4:
            self.length, self.table = 4, torch.arange(4.0)
        self.asked += self.counts
        return self.last(x + self.table)


def test_a_cache_is_no_reason_for_a_notice_and_a_count_is(tmp_path):
    x, y = torch.randn(8, 4), torch.randn(8, 1)
    for counts, said in ((0, []), (1, ["'asked' of Caching"])):
        job = kway.Job(
            model=partial(Caching, counts),
            loss=nn.MSELoss(),
            optimizer=partial(torch.optim.SGD, lr=0.1),
            data=(x, y),
            batch_size=4,
        )
        out = tmp_path / str(counts)
        run = kway.train(job, devices="cpu:1", epochs=2, out=out, checkpoint_every="1epochs", echo=False)
        lines = [line for line in run.record.notices if line.startswith("attributes of the model")]
        assert len(lines) == len(said)
        assert all(text in line for text, line in zip(said, lines, strict=True))
