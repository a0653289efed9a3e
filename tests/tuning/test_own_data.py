"""What tuning leaves of the user's data: all of it. Trials read a copy, and a tuned run is that without trials."""

import threading
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import kway

pytestmark = pytest.mark.usefixtures("short")

X, Y = torch.randn(64, 8, generator=torch.Generator().manual_seed(0)), torch.arange(64) % 3


class Draws(Dataset):
    """Draws from a generator of its own, counts, and holds what ``copy.deepcopy`` refuses."""

    def __init__(self, held=None):
        self.generator, self.asked, self.held = torch.Generator().manual_seed(1), 0, held

    def __len__(self):
        return len(X)

    def __getitem__(self, place):
        self.asked += 1
        return X[place] + torch.rand(1, generator=self.generator), Y[place]


def job(data):
    sgd = partial(torch.optim.SGD, lr=0.05)
    return kway.Job(lambda: nn.Linear(8, 3), nn.CrossEntropyLoss(), sgd, data, batch_size=16)


def test_tune_asks_a_copy_of_the_data():
    data = Draws(threading.Lock())
    before = data.generator.get_state()
    assert kway.tune(job(data), devices="cpu:1", seconds=5).how == "measured"
    assert data.asked == 0
    assert torch.equal(data.generator.get_state(), before)


def test_a_run_that_tunes_itself_reads_what_it_would_have_read():
    run = partial(kway.train, devices="cpu:1", steps=3)
    tuned = run(job(Draws()), tune_seconds=5)
    assert tuned.record.tuned["how"] == "measured"
    plain = run(job(Draws()), tune=False)
    for name, value in plain.model.state_dict().items():
        torch.testing.assert_close(tuned.model.state_dict()[name], value)


def test_data_that_cannot_be_copied_are_left_with_the_reason():
    data = Draws(row for row in X)
    why = "data of type Draws that cannot be copied (TypeError: cannot pickle 'generator' object)"
    record = kway.tune(job(data), devices="cpu:1")
    assert (record.how, record.why, data.asked) == ("left", why, 0)
    run = kway.train(job(data), devices="cpu:1", steps=1, tune_seconds=5)
    assert run.record.tuned["why"] == why
