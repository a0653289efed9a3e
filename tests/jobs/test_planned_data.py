"""What a plan that is made on the way leaves of the user's data: all of it. The run is that without a plan."""

from functools import partial

import pytest
import torch
from tests.planning.machine import measurements
from tests.workloads import workload
from torch import nn
from torch.utils.data import Dataset, IterableDataset

import kway
from kway.devices.simulated import simulated
from kway.jobs import checking

X, Y = torch.randn(64, 8, generator=torch.Generator().manual_seed(0)), torch.arange(64) % 4


class Draws(Dataset):
    """Draws from a generator of its own, and adds how often it was asked."""

    def __init__(self):
        self.generator, self.asked = torch.Generator().manual_seed(1), 0

    def __len__(self):
        return 64

    def __getitem__(self, place):
        self.asked += 1
        return X[place] + torch.rand(8, generator=self.generator) + self.asked / 64, Y[place]


class Once(IterableDataset):
    """Can be read once."""

    def __init__(self):
        self.items = iter([(X[place], Y[place]) for place in range(64)])

    def __iter__(self):
        return self.items


def net():
    return nn.Sequential(nn.Linear(8, 6), nn.Dropout(0.2), nn.Linear(6, 4))


def job(data):
    return kway.Job(net, nn.CrossEntropyLoss(), partial(torch.optim.SGD, lr=0.1), data, batch_size=16)


@pytest.fixture(autouse=True)
def one_core(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("kway.jobs.asked.discover", lambda: simulated(cores=1))
    monkeypatch.setattr("kway.jobs.automatic.MOST_S", 0.3)


@pytest.mark.parametrize("data", [Draws, Once])
def test_a_run_that_was_planned_on_the_way_is_that_with_its_strategy_named(data):
    planned = kway.train(job(data()), devices="cpu:1", strategy="auto", steps=4)
    # It was: nothing was known of the model before.
    assert planned.record.predicted_step_s is not None
    named = kway.train(job(data()), devices="cpu:1", strategy="single", steps=4)
    assert planned.record.weights_sha256 == named.record.weights_sha256


def test_runs_of_a_check_read_data_of_their_own(monkeypatch):
    monkeypatch.setattr(checking, "RUN_S", 0.0)
    monkeypatch.setattr(checking, "LEAST_WINDOWS", 1)
    own, stream = Draws(), Once()
    known = workload((4, 8, 16), model="net")
    for data in (own, stream):
        record = kway.plan(
            job(data), devices="cpu:1", check=True, workload=known, measurements=measurements()
        )
        if data is own:
            assert len(record.best["rounds"]) == checking.ROUNDS
    assert own.asked == 0
    assert len([*stream]) == 64
