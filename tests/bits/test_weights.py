"""One SHA-256 of the weights, and the same figures, for every number of ranks from 1 to that of the shards."""

from functools import partial

import pytest
import torch
from torch import nn

import kway
from kway.zoo import get

SHARDS, BATCH, SAMPLES, HELD_OUT = 5, 23, 56, 13
CLASSES = 4
SMALL, LARGE = (1, 6, 6), (1, 14, 14)


class Sequence(nn.Module):
    """Rows of an image through an LSTM, a norm over all its states, and dropout."""

    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(6, 8, num_layers=2, dropout=0.2, batch_first=True)
        self.norm, self.drop, self.out = nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, CLASSES)

    def forward(self, images):
        states = self.norm(self.rnn(images.squeeze(1))[0].transpose(1, 2))
        return self.out(self.drop(states.mean(2)))


def normed():
    return nn.Sequential(
        nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 8, 3, bias=False),
        nn.BatchNorm2d(8, momentum=None), nn.ReLU(), nn.Flatten(), nn.Linear(32, CLASSES),
    )  # fmt: skip


MODELS = {
    "mlp": (partial(get("mlp"), SMALL, CLASSES), SMALL),
    "lenet": (partial(get("lenet"), LARGE, CLASSES), LARGE),
    "normed": (normed, SMALL),
    "sequence": (Sequence, SMALL),
}


def shrinking(optimizer):
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def decay(model):
    return 1e-3 * sum(p.square().sum() for p in model.parameters())


def job_of(name, **more):
    model, shape = MODELS[name]
    g = torch.Generator().manual_seed(1)
    images, labels = (
        torch.randn(SAMPLES, *shape, generator=g),
        torch.randint(CLASSES, (SAMPLES,), generator=g),
    )
    held = torch.randn(HELD_OUT, *shape, generator=g), torch.arange(HELD_OUT) % CLASSES
    return kway.Job(
        model=model, loss=nn.CrossEntropyLoss(label_smoothing=0.1), data=(images, labels), validation=held,
        optimizer=partial(torch.optim.AdamW, lr=0.01), batch_size=BATCH, clip=0.5, schedule=shrinking,
        penalty=decay, metrics={"accuracy": kway.accuracy}, seed=3, **more,
    )  # fmt: skip


def trained(job, size, ranks, **options):
    options = {"epochs": 2, "shards": SHARDS, **options}
    return kway.train(
        job, devices=f"cpu:{size}", strategy="data", exactness="bits", ranks=ranks, echo=False, **options
    )


def figures(run):
    return [{k: v for k, v in row.items() if k not in ("seconds", "samples_per_s")} for row in run.epochs]


@pytest.mark.parametrize("name", MODELS)
def test_every_number_of_ranks_gives_the_same_weights_and_figures(five, name):
    # All of them for the models with batch normalisation, which is where ranks meet within a model.
    sizes = range(1, SHARDS + 1) if name in ("normed", "sequence") else (1, 2, SHARDS)
    runs = {size: trained(job_of(name), size, five) for size in sizes}
    assert len({run.record.weights_sha256 for run in runs.values()}) == 1
    assert [row["accuracy"] for row in runs[1].epochs]
    for run in runs.values():
        assert figures(run) == figures(runs[1])


def test_precision_and_shards_do_change_the_bits(five):
    """So that the tests above compare something."""
    usual = trained(job_of("normed"), 2, five).record.weights_sha256
    assert trained(job_of("normed"), 2, five, shards=4).record.weights_sha256 != usual
    assert trained(job_of("normed", precision="bf16"), 2, five).record.weights_sha256 != usual


@pytest.mark.parametrize("precision", ["fp64", "bf16", "fp16"])
def test_in_every_precision(five, precision):
    job = job_of("normed", precision=precision)
    assert len({trained(job, size, five).record.weights_sha256 for size in (1, 5)}) == 1


def test_more_shards_than_samples(five):
    """The last batch holds ten samples for twelve shards: some have none."""
    job = job_of("mlp")
    assert len({trained(job, size, five, shards=12).record.weights_sha256 for size in (1, 5)}) == 1


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", ["lenet", "sequence"])
def test_the_threads_of_the_caller_do_not_matter(five, threads, name):
    found = set()
    for count in (1, 3):
        threads(count)
        found.add(trained(job_of(name), 1, five).record.weights_sha256)
        assert torch.get_num_threads() == count
    assert len(found) == 1


def test_the_callers_random_state_does_not_matter(five):
    found = set()
    for seed in (0, 1):
        torch.manual_seed(seed)
        found |= {trained(job_of("sequence"), size, five).record.weights_sha256 for size in (1, 2)}
    assert len(found) == 1


def test_evaluation_is_equal_to_the_bit(five):
    job = job_of("sequence")
    weights = trained(job, 1, five).model.state_dict()

    def initial(model):
        model.load_state_dict(weights)

    def values(size):
        # A step of no length: what is left of the run is its evaluation.
        still = kway.Job(**{**vars(job), "init": initial, "optimizer": partial(torch.optim.SGD, lr=0.0)})
        return trained(still, size, five, steps=1).epochs[-1]["validation_loss"]

    assert len({values(size) for size in range(1, SHARDS + 1)}) == 1
