"""Tuning on several ranks: what fails on one of them, or on all alike, and what only one hears or writes."""

from functools import partial
from unittest import mock

import pytest
import torch
from torch import nn

import kway
from kway.jobs.place import Place
from kway.records import Plan
from kway.training.wish import Wish
from kway.tuning import trial
from kway.tuning.run import tune

X, Y = torch.randn(64, 1, 6, 6, generator=torch.Generator().manual_seed(0)), torch.arange(64) % 3


def job(model):
    return kway.Job(model, nn.CrossEntropyLoss(), partial(torch.optim.SGD, lr=0.05), (X, Y), batch_size=16)


class Fails(nn.Module):
    """Fails on the ranks from ``rank`` on: at once, or when its weights lie otherwise than at first."""

    def __init__(self, rank, at_once=False, error=RuntimeError):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(64, 3))
        self.rank, self.at_once, self.error = rank, at_once, error

    def forward(self, x):
        moved = not self.layers[0].weight.is_contiguous()
        if torch.distributed.get_rank() >= self.rank and (moved or self.at_once):
            raise self.error("no memory: can't allocate memory" if self.error is MemoryError else "of no use")
        return self.layers(torch.cat([x, x], 1))


def tuned_here(context, model, seconds, stop="", why=""):
    """Tune on a rank and return what came of it. ``stop``: the method of trials in which rank 1 hears a signal;
    ``why``: why nothing may be measured.
    """
    plan = Plan("data", {"data": 2}, ["cpu", "cpu"], "math", "")
    heard = getattr(trial.Trials, stop or "measure")

    def hears(self, *given):
        context.stop.by = "SIGTERM" if stop and context.world.rank == 1 else ""
        return heard(self, *given)

    with (
        mock.patch.multiple(trial, WINDOW_S=0.0, ALIKE_S=2.0),
        mock.patch.object(trial.Trials, stop or "measure", hears),
        mock.patch.multiple("kway.tuning.run", MOST_S=20.0, missing=lambda device: "none"),
    ):
        wish, length = Wish(seconds, remembers=False, why_not=why), (10**8, None)
        given = context.world, job(model), plan, model, wish, length, context.status, print, context.stop
        return tune(*given)


@pytest.mark.parametrize("error", [RuntimeError, MemoryError, kway.UsageError])
def test_what_fails_on_all_ranks_alike_is_refused_and_the_rest_is_tried(ranks, error):
    one, other = ranks.run(tuned_here, Fails(0, error=error), 10)
    verdicts = {row.choice.get("memory_format", ""): row.verdict for row in one.found.rows}
    assert "refused" in verdicts["channels_last"]
    assert [row.choice for row in one.found.rows] == [row.choice for row in other.found.rows]
    assert any("optimizer" in row.choice and row.reading.step_s for row in one.found.rows)


@pytest.mark.parametrize("error", [MemoryError, kway.UsageError])
def test_a_rank_that_fails_alone_ends_all_soon_whatever_it_raises(ranks, error):
    with pytest.raises(kway.KwayError, match="tune=False"):
        ranks.run(tuned_here, Fails(1, error=error), 10, limit=30)


def test_a_run_that_nobody_asked_to_tune_begins_though_its_step_fails_in_trials(ranks):
    for tuned in ranks.run(tuned_here, Fails(0, at_once=True), None):
        assert (tuned.how, tuned.choice) == ("left", {})
        assert "of no use" in tuned.why
    with pytest.raises(kway.RankError, match="of no use"):
        ranks.run(tuned_here, Fails(0, at_once=True), 10)


def test_nothing_more_is_tried_once_a_rank_is_to_stop(ranks):
    for tuned in ranks.run(tuned_here, Fails(2), 20, "prepare"):
        assert (tuned.how, "no time" in tuned.why) == ("left", True)
    for tuned in ranks.run(tuned_here, Fails(2), 20, "measure"):
        assert (tuned.choice, tuned.found.whole) == ({}, False)
        assert [row.reading is None for row in tuned.found.rows] == [False, True, True, True]


def tuned_among(context, folder):
    """Tune inside ranks that are there, each of which names another folder."""
    where = Place(Plan("data", {"data": 2}, ["cpu", "cpu"], "math", ""), 1, context.world)
    with mock.patch("kway.jobs.tuning.place", return_value=where):
        return kway.tune(job(Fails(2)), seconds=1e-9, out=folder / str(context.world.rank)).how


def test_inside_ranks_that_are_there_the_first_names_the_folder_and_writes(ranks, tmp_path):
    assert ranks.run(tuned_among, tmp_path) == ["left", "left"]
    assert [*tmp_path.rglob("*.json")] == [tmp_path / "0" / "tune.json"]
    assert not (tmp_path / "1").exists()


def test_a_run_that_was_ended_before_measures_nothing_and_says_why(ranks):
    for tuned in ranks.run(tuned_here, Fails(2), 10, "", "it was ended before"):
        assert (tuned.how, tuned.why, tuned.found) == ("left", "it was ended before", None)
