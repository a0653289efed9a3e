"""Level bits: the same bits on every number of devices, of an arithmetic that plain torch confirms."""

from functools import partial

import pytest
import torch
from torch import nn

import kway
from kway.data.order import KeyedOrder, split

SHARDS = 4
EPOCHS = 2
G = torch.Generator().manual_seed(0)
X, Y = torch.randn(29, 1, 5, 5, generator=G), torch.arange(29) % 4
TOKENS = torch.arange(65).view(13, 5) % 7
LABELS = torch.where(torch.rand(13, 5, generator=G) < 0.4, -100, TOKENS.flip(1))


def convolution():
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(27, 4))


def dropped():
    return nn.Sequential(nn.Flatten(), nn.Linear(25, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 4))


class Words(nn.Module):
    """Tied input and output tables."""

    def __init__(self):
        super().__init__()
        self.table, self.out = nn.Embedding(7, 4), nn.Linear(4, 7)
        self.out.weight = self.table.weight

    def forward(self, tokens):
        return self.out(torch.tanh(self.table(tokens))).transpose(1, 2)


def decay(model):
    return 0.01 * sum(p.square().sum() for p in model.parameters())


def halving(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


CE = nn.CrossEntropyLoss()
WEIGHTED = nn.CrossEntropyLoss(weight=torch.linspace(0.2, 3, 7), ignore_index=-100, label_smoothing=0.1)
SETTINGS = {
    "norm": {"model": convolution, "loss": CE, "data": (X, Y), "batch_size": 11},
    "dropout": {"model": dropped, "loss": CE, "data": (X, Y), "batch_size": 7},
    "tied": {"model": Words, "loss": WEIGHTED, "data": (TOKENS, LABELS), "batch_size": 6},
    "everything": {
        "model": dropped, "loss": CE, "data": (X, Y), "batch_size": 10, "penalty": decay, "clip": 0.5,
        "schedule": halving, "validation": (X[:9], Y[:9]), "metrics": {"accuracy": kway.accuracy},
    },
}  # fmt: skip


def job_of(name, **more):
    adam = partial(torch.optim.AdamW, lr=0.01)
    return kway.Job(**{"optimizer": adam, "seed": 5, **SETTINGS[name], **more})


def figures(run):
    left_out = {"seconds", "samples_per_s"}
    return [{key: value for key, value in row.items() if key not in left_out} for row in run.epochs]


def train(ranks, job, size):
    return kway.train(
        job, devices=f"cpu:{size}", strategy="data", exactness="bits", shards=SHARDS, epochs=EPOCHS, ranks=ranks,
        echo=False,
    )  # fmt: skip


@pytest.mark.parametrize("name", SETTINGS)
def test_weights_losses_and_metrics_are_equal_to_the_bit(ranks, name):
    # Ranks of the pool have one thread each, and bits hold within one number of threads.
    alone = ranks.run(train_in_rank, job_of(name), size=1)[0]
    for size in (2, 3, 4):
        run = train(ranks, job_of(name), size)
        assert run.record.weights_sha256 == alone[0], size
        assert figures(run) == alone[1], size


def train_in_rank(context, job):
    run = kway.train(job, devices="cpu:1", exactness="bits", shards=SHARDS, epochs=EPOCHS)
    return run.record.weights_sha256, figures(run)


@pytest.mark.parametrize("name", SETTINGS)
def test_the_proof_holds(ranks, name):
    proof = kway.prove(
        job_of(name),
        devices="1,2,3,4",
        exactness="bits",
        shards=SHARDS,
        own_optimizer=True,
        ranks=ranks,
        echo=False,
    )
    assert proof.verdict == "pass", [(row["equal"], row["reason"]) for row in proof.candidates]
    assert [row["equal"] for row in proof.candidates] == ["bits"] * 4


def by_hand(job):
    """Train over the shards of every batch in plain torch, in float64, with one running update a step."""
    torch.manual_seed(job.seed)
    model = job.model().double()
    convolve, norm = model[0], model[1]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    order = KeyedOrder(len(X), job.batch_size, job.seed)
    for epoch in range(EPOCHS):
        for step in range(order.steps(epoch)):
            x, y = (part[torch.from_numpy(order.batch(epoch, step))] for part in (X.double(), Y))
            seen = convolve(x).detach().transpose(0, 1).flatten(1)
            running = 0.9 * norm.running_mean + 0.1 * seen.mean(1), 0.9 * norm.running_var + 0.1 * seen.var(1)
            sizes = [size for size in split(len(x), SHARDS) if size]
            loss = nn.functional.cross_entropy(torch.cat([model(piece) for piece in x.split(sizes)]), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            norm.running_mean, norm.running_var = running
    return model


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_arithmetic_is_that_of_a_loop_over_the_shards(ranks, size):
    job = job_of("norm", precision="fp64", optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9))
    own, right = train(ranks, job, size).model, by_hand(job)
    for (name, value), expected in zip(own.state_dict().items(), right.state_dict().values(), strict=True):
        if name.endswith("num_batches_tracked"):
            assert int(value) == EPOCHS * 3
        else:
            torch.testing.assert_close(value, expected, rtol=0, atol=1e-12, msg=name)


@pytest.mark.parametrize(
    ("size", "job", "said"),
    [
        (4, {"shards": 3}, "4 devices at exactness bits with 3 shards"),
        (2, {"micro_batch": 2}, "the shards are the micro-batches"),
    ],
)
def test_what_cannot_keep_its_bits_is_refused(ranks, size, job, said):
    shards = job.pop("shards", SHARDS)
    with pytest.raises(kway.RefusedError, match=said):
        kway.train(
            job_of("dropout", **job),
            devices=f"cpu:{size}",
            exactness="bits",
            shards=shards,
            ranks=ranks,
            echo=False,
        )


def test_a_shard_with_one_value_a_channel_names_the_shard(ranks):
    job = job_of("dropout", model=flat_norm, batch_size=5)
    with pytest.raises(kway.UsageError, match=r"shard 1 has 1 .*fewer shards"):
        kway.train(job, devices="cpu:1", exactness="bits", shards=SHARDS, epochs=1)


def flat_norm():
    return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(25), nn.Linear(25, 4))
