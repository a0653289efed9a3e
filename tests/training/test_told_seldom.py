"""A run whose steps seldom tell whether ranks called the same collectives: it knows before it relies on numbers."""

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import kway
from kway.errors import KwayError
from kway.records import Plan
from kway.step.telling import SELDOM, seldom_where_it_costs
from kway.training.loop import Loop
from kway.training.spec import Interval, TrainSpec

STEPS, NEVER = 8, 1000
DRAW = torch.Generator().manual_seed(1)
DATA = (torch.rand(STEPS * 4, 6, generator=DRAW), torch.randint(4, (STEPS * 4,), generator=DRAW))


class Breaks(nn.Module):
    """Gives no number in training step ``at``."""

    def __init__(self, at):
        super().__init__()
        self.layer, self.at, self.steps = nn.Linear(6, 4), at, 0

    def forward(self, x):
        self.steps += self.training
        return self.layer(x) * (float("nan") if self.training and self.steps == self.at else 1.0)


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return zip(*DATA, strict=True)


def run(context, folder, every, differs_after, stops_after, breaks_in, stream, options):
    """Train on two ranks of which the first calls something by itself after a step; say how that ended, and when."""
    job = kway.Job(
        model=partial(Breaks, breaks_in), loss=nn.CrossEntropyLoss(), optimizer=partial(torch.optim.SGD, lr=0.1),
        data=Stream() if stream else DATA, batch_size=4,
    )  # fmt: skip
    plan = Plan("data", {"data": 2}, ["cpu"] * 2, "math", "")
    spec = TrainSpec(job=job, plan=plan, folder=folder, log_every=1, is_kept=True, **{"epochs": 2, **options})
    torch.manual_seed(0)

    def emit(event):
        # On the first rank alone.
        if event["event"] == "step" and loop.steps == differs_after:
            loop.engine.part.batch_group.trace.note("by itself")
        if event["event"] == "step" and loop.steps == stops_after:
            loop.stop.by = "SIGTERM"

    loop = Loop(context.world, spec, job.model(), emit, status=context.status, told_every=every)
    try:
        loop.run()
    except KwayError as error:
        return type(error).__name__, loop.steps
    return "", loop.steps


@pytest.fixture
def ended(ranks, tmp_path):
    def end(every=NEVER, differs_after=None, stops_after=None, breaks_in=None, stream=False, **options):
        asked = (every, differs_after, stops_after, breaks_in, stream, options)
        found = ranks.run(run, str(tmp_path), *asked)
        assert found[0] == found[1]
        return found[0]

    return end


@pytest.mark.parametrize(
    ("every", "options", "told_in"),
    [
        (3, {}, 3),
        (1, {}, 2),
        (NEVER, {}, STEPS),
        (NEVER, {"validate_every": Interval(5, "steps")}, 5),
        (NEVER, {"checkpoint_every": Interval(4, "steps")}, 4),
        (NEVER, {"steps": 6}, 6),
    ],
    ids=["one in three", "each", "end of the epoch", "validation", "save", "last step"],
)
def test_a_step_after_which_all_is_looked_at_tells(ended, every, options, told_in):
    # The error comes inside of the step that tells, before it counts as taken.
    assert ended(every, differs_after=1, **options) == ("MispairedError", told_in - 1)


def test_what_nobody_knew_before_the_step_is_compared_after_it(ended, tmp_path):
    assert ended(differs_after=1, stops_after=3) == ("MispairedError", 4)
    assert not [*Path(tmp_path).rglob("step-*")]
    assert ended(differs_after=1, stream=True) == ("MispairedError", STEPS)


def test_nothing_is_said_of_ranks_that_called_the_same(ended, tmp_path):
    assert ended() == ("", 2 * STEPS)
    assert ended(stops_after=3) == ("StoppedError", 4)
    assert [path.name for path in Path(tmp_path).rglob("step-*")] == ["step-4"]


def test_a_loss_is_not_blamed_for_what_ranks_of_which_one_called_something_else_gave(ended):
    assert ended(differs_after=1, breaks_in=4) == ("MispairedError", 3)
    assert ended(breaks_in=4) == ("NonFiniteError", 3)


def test_where_comparing_costs_nothing_each_step_tells():
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    assert [seldom_where_it_costs(cpu, False), seldom_where_it_costs(gpu, True)] == [1, 1]
    assert seldom_where_it_costs(gpu, False) == SELDOM > 1
