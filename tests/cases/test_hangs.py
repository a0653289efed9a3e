"""Ranks that wait for one that will not come: the job ends soon, and says which."""

import re
import time
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

import kway
from kway.errors import MispairedError, StallError
from kway.launch.local import Ranks


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    """Ranks that wait in vain are told of after a second, not five: what they are at does not change any more."""
    monkeypatch.setattr("kway.launch.stall.LEFT_S", 1.0)


def job_of():
    return kway.Job(
        model=partial(nn.Linear, 1, 1), loss=nn.MSELoss(), optimizer=partial(torch.optim.SGD, lr=0.1),
        data=(torch.ones(6, 1), torch.ones(6, 1)), batch_size=2,
    )  # fmt: skip


def loop(context, job, most):
    """A user's loop that takes another number of batches on each rank."""
    with kway.parallel(job, strategy="data") as p:
        for batch in p.batches(0):
            if p.steps == most[p.rank]:
                break
            p.step(batch)


@pytest.mark.starts
@pytest.mark.usefixtures("leftovers", "forks")
@pytest.mark.parametrize("most", [(2, 3), (0, 3)], ids=["2-and-3", "0-and-3"])
def test_h01_a_rank_with_fewer_batches_is_named_with_both_counts(most):
    said = rf"rank 0 left after step {most[0]} at .*; rank 1 at step {most[0] + 1}, reduce"
    with Ranks(["cpu"] * 2, threads=1, echo=False) as ranks, pytest.raises(StallError, match=said):
        ranks.run(loop, job_of(), most)


@pytest.mark.starts
@pytest.mark.usefixtures("leftovers", "forks")
def test_h05_a_save_on_the_main_rank_alone_is_an_error(tmp_path):
    def saves(context, job):
        with kway.parallel(job, strategy="data") as p:
            for batch in p.batches(0):
                p.step(batch)
                if p.is_main:
                    p.save(tmp_path)

    with Ranks(["cpu"] * 2, threads=1, echo=False) as ranks, pytest.raises(MispairedError) as caught:
        ranks.run(saves, job_of())
    assert str(caught.value).startswith("rank 0 at step 1, inside p.save; rank 1 at step 2, reduce: ")
    assert not list(tmp_path.iterdir())


@pytest.mark.starts
@pytest.mark.usefixtures("leftovers", "forks")
@pytest.mark.parametrize("call", ["p.save", "p.gather", "kway.evaluate", "kway.predict"])
def test_a_call_on_one_rank_alone_is_an_error_whatever_the_other_sends(tmp_path, call):
    """A gather of the layer's, of other length than the call's own, would have Gloo end the process."""

    def calls(context, job):
        with kway.parallel(job, strategy="data") as p:
            act = {
                "p.save": partial(p.save, tmp_path),
                "p.gather": partial(p.gather, 1),
                "kway.evaluate": partial(kway.evaluate, job),
                "kway.predict": partial(kway.predict, job),
            }[call]
            for batch in p.batches(0):
                p.step(batch)
                if p.rank == 1:
                    act()

    said = rf"rank 0 at step 2, reduce.*; rank 1 at step 1, inside {re.escape(call)}: "
    with Ranks(["cpu"] * 2, threads=1, echo=False) as ranks, pytest.raises(MispairedError, match=said):
        ranks.run(calls, replace(job_of(), model=Normed))


def test_ranks_that_make_other_calls_are_told_which(ranks, tmp_path):
    def calls(context, job):
        with kway.parallel(job, strategy="data") as p:
            for batch in p.batches(0):
                p.step(batch)
            p.save(tmp_path) if p.is_main else p.evaluate()

    job = job_of()
    with pytest.raises(
        MispairedError, match=r"rank 0 called p\.save; rank 1 called p\.evaluate: all ranks must"
    ):
        ranks.run(calls, replace(job, validation=job.data), size=2)


def test_ranks_that_evaluate_in_other_ways_are_told_which(ranks):
    """One after the other on each rank, of the same model: what they send could be paired."""

    def calls(context, job):
        with kway.parallel(job, strategy="data") as p:
            for batch in p.batches(0):
                p.step(batch)
            kway.evaluate(job) if p.is_main else p.evaluate()

    job = job_of()
    with pytest.raises(
        MispairedError, match=r"rank 0 called kway\.evaluate; rank 1 called p\.evaluate: all ranks must"
    ):
        ranks.run(calls, replace(job, validation=job.data), size=2)


@pytest.mark.starts
@pytest.mark.usefixtures("leftovers", "forks")
def test_a_rank_has_not_left_its_loop_once_an_evaluation_inside_is_over():
    """What it does by itself afterwards may take as long as it likes."""

    def calls(context, job):
        with kway.parallel(job, strategy="data") as p:
            for batch in p.batches(0):
                p.step(batch)
            kway.evaluate(job)
            if p.is_main:
                time.sleep(3)  # longer than LEFT_S
            for batch in p.batches(1):
                p.step(batch)
            return p.steps

    with Ranks(["cpu"] * 2, threads=1, echo=False) as ranks:
        assert ranks.run(calls, job_of()) == [6, 6]


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(1, 40), nn.BatchNorm1d(40), nn.Linear(40, 1))

    def forward(self, x):
        return self.layers(x)


class Routed(nn.Module):
    """A batch normalisation for the samples that have something positive: only some ranks come to it."""

    def __init__(self):
        super().__init__()
        self.layer, self.norm = nn.Linear(1, 1), nn.BatchNorm1d(1)

    def forward(self, x):
        some = x[:, 0] > 0
        return torch.cat([self.norm(x[some]), self.layer(x[~some])]) if some.any() else self.layer(x)


@pytest.mark.starts
@pytest.mark.usefixtures("leftovers", "forks")
def test_a_layer_that_only_some_ranks_come_to_is_an_error_that_says_so():
    rows = torch.tensor([[1.0], [1.0], [-1.0], [-1.0]])
    job = kway.Job(
        model=Routed, loss=nn.MSELoss(), optimizer=partial(torch.optim.SGD, lr=0.1), data=(rows, rows),
        batch_size=4, shuffle=False,
    )  # fmt: skip
    said = r"rank 0 at step 1, reduce \(all-gather\); rank 1 at step 1, reduce \(all-reduce\): .*batch normalisation"
    with Ranks(["cpu"] * 2, threads=1, echo=False) as ranks, pytest.raises(MispairedError, match=said):
        ranks.run(loop, job, (1, 1))
