"""What tuning leaves of the user's data: all of it. Trials read a copy, and a tuned run is that without trials."""

import threading
import time
import warnings
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

import kway
from kway.tuning.loading import why_once, workers_of

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


class Slow(Dataset):
    """Takes its time for each sample, which waits for nothing that workers share."""

    def __len__(self):
        return len(X)

    def __getitem__(self, place):
        time.sleep(0.002)
        return X[place], Y[place]


@pytest.mark.filterwarnings("error:This DataLoader will create")
def test_a_step_that_waits_for_samples_gets_workers_where_it_has_none():
    record = kway.tune(job(Slow()), devices="cpu:1", seconds=30, step_kind="eager")
    tried = {row["choice"].get("workers"): row for row in record.rows}
    assert set(tried) >= {None, 2, 4, 8}
    assert tried[8]["ratio"] < 0.7
    assert record.choice["workers"] in (2, 4, 8)
    assert not any("workers" in note for note in record.notices)
    named = kway.tune(replace(job(Slow()), workers=0), devices="cpu:1", seconds=30, step_kind="eager")
    assert any("workers (named)" in note for note in named.notices)


def test_torch_s_warning_of_many_workers_is_for_who_named_them(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0})
    with pytest.warns(UserWarning, match="This DataLoader will create 2 worker processes"):
        kway.train(replace(job(Slow()), workers=2), devices="cpu:1", steps=1, echo=False)
    told = {"how": "measured", "why": "", "seconds": 1.0, "made": "", "choice": {"workers": 2}}
    monkeypatch.setattr(
        "kway.jobs.training.in_the_way_chosen",
        lambda context, spec, model: replace(spec, job=replace(spec.job, workers=2), tuned=told),
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "This DataLoader will create")
        run = kway.train(job(Slow()), devices="cpu:1", steps=1, echo=False)
    assert run.record.tuned == told


class Counts(Slow):
    """Its samples say how many were read before."""

    def __init__(self):
        self.read = 0

    def __getitem__(self, place):
        self.read += 1
        return super().__getitem__(place)[0] + self.read / 1e3, Y[place]


def test_samples_that_change_from_one_reading_to_the_next_get_no_workers():
    record = kway.tune(job(Counts()), devices="cpu:1", seconds=30, step_kind="eager")
    assert record.how == "measured"
    assert not any("workers" in row["choice"] for row in record.rows)
    assert any("workers (" in note and "when they are read again" in note for note in record.notices)


class ReadOnce(Counts):
    """Has each sample once."""

    def __getitem__(self, place):
        if self.read:
            raise KeyError("taken already")
        return super().__getitem__(place)


def test_of_a_sample_that_cannot_be_read_twice_the_reason_is_what_was_raised():
    assert why_once(job(Slow())) == ""
    assert why_once(job(Counts())) == "its samples are others when they are read again"
    why = why_once(job(ReadOnce()))
    assert why.startswith("to read a sample twice raises ")
    assert "KeyError: 'taken already'" in why


def test_a_run_that_nobody_asked_to_tune_starts_no_workers_of_its_own(monkeypatch):
    tried = []
    monkeypatch.setattr("kway.tuning.run.LEAST_STEPS", 1)

    def noted(*given):
        tried.append(workers_of(*given))
        return tried[-1]

    monkeypatch.setattr("kway.tuning.run.workers_of", noted)
    loader = partial(DataLoader, TensorDataset(X, Y), batch_size=16, collate_fn=default_collate_of_my_own)
    kway.train(replace(job(loader()), batch_size=None), devices="cpu:1", steps=1)
    kway.train(replace(job(loader(num_workers=1)), batch_size=None), devices="cpu:1", steps=1)
    kway.train(replace(job((X, Y)), batch_size=16), devices="cpu:1", steps=1, tune_seconds=1)
    nobody = "a run that nobody asked to tune starts none"
    assert tried == [(None, nobody), (1, ""), (None, "the data is in memory")]


def default_collate_of_my_own(samples):
    return default_collate(samples)


def test_data_that_cannot_be_copied_are_left_with_the_reason():
    data = Draws(row for row in X)
    why = "data of type Draws that cannot be copied (TypeError: cannot pickle 'generator' object)"
    record = kway.tune(job(data), devices="cpu:1")
    assert (record.how, record.why, data.asked) == ("left", why, 0)
    run = kway.train(job(data), devices="cpu:1", steps=1, tune_seconds=5)
    assert run.record.tuned["why"] == why
