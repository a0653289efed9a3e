"""What a tuning takes of its seconds, on a clock that only trials move: never more than there are."""

import re
import time
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import kway
from kway.tuning import run
from kway.tuning.knobs import Subject, stages
from kway.tuning.run import FIRST_S, KERNELS, _Budget
from kway.tuning.search import Reading, search
from kway.tuning.trial import compiles
from kway.world import StopRequest

SUBJECT = Subject(
    "cuda", 2, allowed=("bf16",), images=True, forms=("foreach", "fused"), gradient_bytes=10**9, may_be_cut=False
)  # fmt: skip
LAYERS, PLAIN = 60, 3.0


class Trials:
    """Takes as long as ``seconds`` says of a choice, its estimate, and whether its kernels are there.

    The more is chosen the faster it is.
    """

    def __init__(self, monkeypatch, seconds, step_kind):
        self.now, self.seconds, self.tried, self.kernels = PLAIN, seconds, [], []
        monkeypatch.setattr(run, "time", SimpleNamespace(perf_counter=lambda: self.now))
        self.group, self.trace_s = SimpleNamespace(objects=lambda value: [value]), 1.0
        self.model = nn.Sequential(*[nn.Identity() for _ in range(LAYERS)])
        self.job, self.plan = SimpleNamespace(precision="fp32"), SimpleNamespace(step_kind=step_kind)
        self.standards = {"fp32": None}

    def measure(self, choice):
        estimate = (self.budget.again if choice in [{}, *self.tried] else self.budget.cost)(choice)
        made = {name: choice.get(name) for name in KERNELS}
        spent = self.seconds(choice, estimate, made in self.kernels)
        if compiles(choice, self.plan):
            self.kernels.append(made)
        self.now += spent
        self.tried.append(choice)
        self.standards[choice.get("precision", "fp32")] = None
        return Reading((0.9 ** len(choice),) * 5, spent, max(0.0, spent - PLAIN))

    def find(self, seconds):
        start = Reading((1.0,) * 5, PLAIN)
        self.budget = _Budget(self, SUBJECT, 0.0, start, seconds, StopRequest(), lambda line: None)
        budget = self.budget
        return search(stages(SUBJECT), budget.measure, budget.cost, budget.again, budget.left, start)


def as_said(choice, estimate, made):
    return estimate


def sooner(choice, estimate, made):
    return max(PLAIN, estimate / 2)


def as_seen(choice, estimate, made):
    """Return what trials of a tuning took that ended late on a GPU. How long the last mode takes is made up."""
    if choice.get("step_kind") not in ("compiled", "compiled-graph"):
        return estimate
    making = {"searched": 123.0, "max-autotune": 250.0}.get(choice.get("compile_mode"), 24.0)
    return PLAIN + (2.0 if made else making)


@pytest.mark.parametrize(
    ("seconds", "step_kind"),
    [(as_said, "eager"), (as_said, "compiled"), (sooner, "eager"), (as_seen, "eager")],
)
def test_no_more_is_spent_than_there_is_and_the_winner_is_measured_again(monkeypatch, seconds, step_kind):
    whole = set()
    for budget in range(5, 1_200, 15):
        trials = Trials(monkeypatch, seconds, step_kind)
        found = trials.find(budget)
        assert trials.now <= budget
        assert (found.again is not None) == bool(found.best)
        assert bool(found.best) == (len(trials.tried) > 0)
        whole.add(found.whole)
    # With the shortest nothing was tried, with the longest everything.
    assert whole == {True, False}
    assert found.best["compile_mode"] == "searched"
    assert FIRST_S["cuda"][0] + LAYERS * FIRST_S["cuda"][1] > 24.0


@pytest.mark.usefixtures("short")
def test_nothing_is_measured_where_windows_alone_take_longer_than_there_is(monkeypatch):
    monkeypatch.setattr("kway.tuning.trial.WINDOW_S", 1.0)
    sgd = partial(torch.optim.SGD, lr=0.05)
    data = torch.zeros(64, 8), torch.arange(64) % 3
    job = kway.Job(partial(nn.Linear, 8, 3), nn.CrossEntropyLoss(), sgd, data, batch_size=16)
    begun = time.perf_counter()
    # Steps of less than a millisecond, but four trials of five windows each.
    record = kway.tune(job, devices="cpu:1", seconds=15)
    assert (record.how, record.rows) == ("left", [])
    said = re.fullmatch(
        r"to try one way and to measure it again takes some (2[\d.]+) s, for which there is no time: (1[\d.]+) s of "
        r"15(?:\.0)? s are left; give (\d\d) s or more \(--tune-seconds \3\)",
        record.why,
    )
    rest, left, give = map(float, said.groups())
    # As many as it takes and what is spent, and some more: 15 were given.
    assert 1.25 * (rest + 15 - left) - 2 <= give <= 1.25 * (rest + 15 - left) + 3
    assert time.perf_counter() - begun < 5
