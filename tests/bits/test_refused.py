"""What cannot keep its bits is refused: before anything starts where that can be known, by name where it cannot."""

from functools import partial

import pytest
import torch
from torch import nn

import kway
from kway.cli.main import main

TRAIN = ["train", "mlp", "--data", "synthetic", "--exactness", "bits", "--epochs", "1"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--devices", "cpu:4", "--shards", "3"], "use --shards 4 or more, or fewer devices"),
        (["--devices", "cpu:2", "--micro-batch", "4"], "the shards are the micro-batches"),
        (["--devices", "cpu:1", "--micro-batch", "4"], "the shards are the micro-batches"),
        (["--devices", "cpu:2", "--shards", "0"], "shards"),
        (
            ["--devices", "cpu:2", "--shards", "65537"],
            "shards=65537: at most 65536: each is a pass of its own",
        ),
        (["--devices", "cpu:1", "--shards", "1000000000"], "as many as the devices that you will ever use"),
    ],
)
def test_before_anything_starts(tmp_path, capsys, leftovers, words, said):
    assert main([*TRAIN, *words, "--out", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("kway: error") == 1
    assert not list(tmp_path.iterdir())
    assert not leftovers()


class Puts(nn.Module):
    """Writes where two values may meet: torch has no deterministic kernel for it on any device."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(3, 4)

    def forward(self, x):
        y = self.net(x)
        return torch.put(y, torch.zeros(2, dtype=torch.long), torch.ones(2))


class Unpools(nn.Module):
    """Undoes a pooling."""

    def __init__(self):
        super().__init__()
        self.pool, self.unpool = nn.MaxPool1d(2, return_indices=True), nn.MaxUnpool1d(2)
        self.net = nn.Linear(4, 4)

    def forward(self, x):
        pooled, places = self.pool(nn.functional.pad(x, (0, 1)).unsqueeze(1))
        return self.net(self.unpool(pooled, places).squeeze(1))


def job_of(model):
    x = torch.randn(9, 3, generator=torch.Generator().manual_seed(0))
    return kway.Job(
        model=model, loss=nn.CrossEntropyLoss(), optimizer=partial(torch.optim.SGD, lr=0.1),
        data=(x, torch.arange(9) % 4), batch_size=9,
    )  # fmt: skip


@pytest.mark.parametrize(("model", "operation"), [(Puts, "put_"), (Unpools, "max_unpooling2d_forward")])
def test_an_operation_without_a_deterministic_kernel_is_named(model, operation):
    with pytest.raises(Exception, match=operation) as caught:
        kway.train(job_of(model), devices="cpu:1", exactness="bits", shards=3, epochs=1)
    assert "deterministic" in str(caught.value)
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("model", [Puts, Unpools])
def test_at_math_it_runs(model):
    kway.train(job_of(model), devices="cpu:1", epochs=1)


class Remembers(nn.Module):
    """Keeps a figure of its rank's share in a buffer."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(3, 4)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x):
        if self.training:
            self.seen.copy_(x.detach().mean(0))
        return self.net(x)


@pytest.mark.parametrize(
    ("size", "shards", "why"),
    [(1, 3, "depends on the samples"), (2, 3, "depends on the samples"), (3, 3, "differs between devices")],
)
def test_a_buffer_that_depends_on_the_share_is_named(ranks, size, shards, why):
    """A device with one shard sees nothing to compare with: it is found where the ranks meet."""
    with pytest.raises(kway.KwayError, match=f"buffer 'seen' {why}"):
        kway.train(
            job_of(Remembers),
            devices=f"cpu:{size}",
            strategy="data",
            exactness="bits",
            shards=shards,
            epochs=1,
            ranks=ranks,
            echo=False,
        )
