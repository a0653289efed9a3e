"""Streams in all that a job does: the result is that of the same items in a list, on any number of ranks."""

import os
import random
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import kway
from kway.jobs.training import training_parts

TRUTH = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)


def item(index):
    x = torch.randn(3, generator=torch.Generator().manual_seed(index), dtype=torch.float64)
    return x, x @ TRUTH


class Rows(IterableDataset):
    def __init__(self, items=13):
        self.items = items

    def __iter__(self):
        return (item(index) for index in range(self.items))


class Noisy(Rows):
    """Augments by the global generators, and gives its items in an order that it draws."""

    def __iter__(self):
        for index in random.sample(range(self.items), self.items):
            x, y = item(index)
            yield x + 0.1 * torch.randn(3, dtype=torch.float64), y


class SplitsItself(Rows):
    """What a user's stream does who has read how to split it over ranks."""

    def __iter__(self):
        rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        return (item(index) for index in range(rank, self.items, size))


def linear():
    return nn.Sequential(nn.Linear(3, 1), nn.Flatten(0))


def deep():
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 1), nn.Flatten(0))


def error(output, target):
    return (output - target).abs()


def job_of(data, model=linear, **more):
    more = {"batch_size": 4, "precision": "fp64", "shuffle": False, "metrics": {"error": error}, **more}
    return kway.Job(
        model=model,
        loss=nn.MSELoss(),
        optimizer=partial(torch.optim.SGD, lr=0.05, momentum=0.9),
        data=data,
        **more,
    )


def trained(ranks, job, size, **more):
    more = {"epochs": 2, "echo": False, **more}
    return kway.train(
        job, devices=f"cpu:{size}", strategy="data" if size > 1 else "single", ranks=ranks, **more
    )


def weights(run):
    return {name: value.clone() for name, value in run.model.state_dict().items()}


@pytest.mark.parametrize("level", ["math", "loose"])
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("items", [13, 9])  # a last batch of one: some ranks have no sample of it
def test_training_equals_that_on_a_list(ranks, level, size, items):
    held_out = Rows(7)
    streamed = trained(ranks, job_of(Rows(items), validation=held_out), size, exactness=level)
    listed = trained(ranks, job_of(list(Rows(items)), validation=list(held_out)), 1)
    for name, value in weights(streamed).items():
        assert torch.allclose(value, weights(listed)[name], rtol=0, atol=1e-12)
    for one, other in zip(streamed.epochs, listed.epochs, strict=True):
        assert (one["steps"], one["samples"]) == (-(-items // 4), items) == (other["steps"], other["samples"])
        for name in ("train_loss", "validation_loss", "error", "train_error"):
            assert one[name] == pytest.approx(other[name], rel=1e-12)


@pytest.mark.parametrize("data", [Rows, Noisy])
def test_bits_are_equal_on_any_number_of_ranks(ranks, data):
    job = job_of(data(19), model=deep, batch_size=8, validation=data(7))
    runs = [trained(ranks, job, size, exactness="bits", shards=4) for size in (1, 2, 3, 4)]
    assert len({run.record.weights_sha256 for run in runs}) == 1
    figures = [
        [[e[n] for n in ("train_loss", "validation_loss", "error")] for e in run.epochs] for run in runs
    ]
    assert figures[0] == figures[1] == figures[2] == figures[3]


def test_all_ranks_see_what_one_device_sees_of_a_stream_that_draws(ranks):
    alone, several = (trained(ranks, job_of(Noisy()), size) for size in (1, 3))
    for name, value in weights(several).items():
        assert torch.allclose(value, weights(alone)[name], rtol=0, atol=1e-12)


def evaluated(context, job, model):
    return kway.evaluate(job, model, strategy="data"), kway.predict(job, model, strategy="data")


@pytest.mark.parametrize("size", [2, 4])
def test_evaluation_and_prediction_count_every_item_once_in_order(ranks, size):
    model = linear().double()
    x, y = (torch.stack(column) for column in zip(*Rows(5), strict=True))
    with torch.no_grad():
        output = model(x)
    job = job_of(Rows(5))
    alone = kway.evaluate(job, model, devices="cpu:1"), kway.predict(job, model, devices="cpu:1")
    for values, found in (alone, *ranks.run(evaluated, job, model, size=size)):
        assert values["loss"] == pytest.approx(float(((output - y) ** 2).mean()), rel=1e-12)
        assert values["error"] == pytest.approx(float((output - y).abs().mean()), rel=1e-12)
        assert torch.allclose(found, output, rtol=0, atol=1e-12)


def test_a_stream_that_splits_itself_over_ranks_is_an_error_that_says_so(ranks):
    with pytest.raises(kway.DataError, match=r"epoch 1, step 1, SplitsItself gives rank 1 other items"):
        trained(ranks, job_of(SplitsItself()), 2)


@pytest.mark.parametrize("size", [1, 2])
def test_an_empty_stream_is_an_error(ranks, size):
    with pytest.raises(kway.DataError, match="Rows gave no item"):
        trained(ranks, job_of(Rows(0)), size)


def test_an_endless_stream_is_trained_on_for_a_number_of_steps(ranks):
    job = job_of(Rows(10**9))
    run = trained(ranks, job, 2, steps=5)
    assert (run.record.steps, run.epochs[0]["samples"]) == (5, 20)


def test_events_say_that_the_number_of_steps_is_not_known(ranks):
    events = []
    trained(ranks, job_of(Rows()), 2, log_every=1, callbacks=[lambda name, body: events.append((name, body))])
    start = next(body for name, body in events if name == "start")
    assert (start["steps_per_epoch"], start["samples"]) == (None, None)
    assert {body["steps"] for name, body in events if name == "step"} == {None}


def test_a_notice_says_what_a_stream_costs_and_that_it_is_not_shuffled(ranks):
    run = trained(ranks, job_of(DataLoader(Rows(), batch_size=4), batch_size=None, shuffle=True), 1)
    assert any("every rank reads all of it" in line and "not shuffled" in line for line in run.record.notices)


def own_loop(session):
    for epoch in range(2):
        for batch in session.batches(epoch):
            session.step(batch)
    return session.evaluate(), {name: value.clone() for name, value in session.model.state_dict().items()}


def in_rank(context, job):
    with kway.parallel(job, devices="auto", strategy="data") as session:
        return own_loop(session)


def test_a_loop_of_the_user_s_own_reads_streams(ranks):
    job = job_of(Rows(), validation=Rows(7))
    expected = trained(ranks, job, 1)
    for values, state in ranks.run(in_rank, job, size=2):
        assert values["loss"] == pytest.approx(expected.epochs[-1]["validation_loss"], rel=1e-12)
        assert all(torch.allclose(state[n], v, rtol=0, atol=1e-12) for n, v in weights(expected).items())


@pytest.mark.parametrize("level", ["math", "bits"])
def test_a_proof_reads_the_first_batches_into_memory(ranks, level):
    proof = kway.prove(job_of(Noisy()), devices="cpu:1 cpu:2 cpu:3", exactness=level, ranks=ranks, echo=False)
    assert proof.verdict == "pass"
    assert any("first 12 items are read into memory" in notice for notice in proof.notices)


@pytest.mark.starts
def test_a_worker_changes_nothing(ranks):
    assert training_parts(job_of(Rows(), workers=3))[0].workers == 1
    runs = [
        trained(ranks, job_of(Noisy(), model=deep, workers=workers), 2, exactness="bits", shards=4)
        for workers in (0, 3)
    ]
    assert runs[0].record.weights_sha256 == runs[1].record.weights_sha256


class FromEntropy:
    def __iter__(self):
        return iter(random.SystemRandom().sample(range(64), 64))


def test_a_sampler_that_draws_from_the_system_is_an_error_that_names_rank_and_epoch(ranks):
    data = DataLoader([item(index) for index in range(64)], batch_size=16, sampler=FromEntropy())
    assert trained(ranks, job_of(data, batch_size=None), 1).record.steps == 8
    with pytest.raises(
        kway.DataError, match="in epoch 1, FromEntropy gives rank 1 another order than rank 0"
    ):
        trained(ranks, job_of(data, batch_size=None), 2)
