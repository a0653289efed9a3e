"""What a data set draws belongs to the sample: not to the rank that reads it, nor to a loader worker."""

import random
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import kway


class Augmented(Dataset):
    """Draws from all three generators for every sample, and a varying number of times."""

    def __len__(self):
        return 31

    def __getitem__(self, index):
        x = torch.linspace(-1, 1, 6) * (index + 1) / 31
        for _ in range(index % 3):
            torch.rand(1)
        x = x + 0.1 * torch.randn(6) + 0.1 * float(np.random.randn()) + 0.1 * random.random()
        return x, index % 3


def model():
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))


def sha(ranks, size, workers, **more):
    job = kway.Job(
        model=model, loss=nn.CrossEntropyLoss(), optimizer=partial(torch.optim.SGD, lr=0.1), data=Augmented(),
        batch_size=12, workers=workers, **more,
    )  # fmt: skip
    run = kway.train(
        job,
        devices=f"cpu:{size}",
        strategy="data",
        exactness="bits",
        shards=5,
        epochs=2,
        ranks=ranks,
        echo=False,
    )
    return run.record.weights_sha256


@pytest.fixture(scope="module")
def alone(five):
    return sha(five, 1, 0)


@pytest.mark.parametrize(("size", "workers"), [(2, 0), (5, 0), (1, 2), (2, 2)])
def test_ranks_and_workers_do_not_matter(five, alone, size, workers):
    assert sha(five, size, workers) == alone


def test_another_seed_draws_otherwise(five, alone):
    assert sha(five, 1, 0, seed=1) != alone
