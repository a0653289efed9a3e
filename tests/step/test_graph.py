"""Steps that are recorded once and done again: what is filled in, what is found not to suit, and the same numbers."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from tests.step.recorded import Double, Net, opened, share
from torch import nn

import kway
from kway.step.graph import MOST_FORMS, TOO_SHORT, WARM_UP, GraphedStep
from kway.step.kinds import KINDS
from kway.step.observe import Watched
from kway.step.outcome import Outcome
from kway.step.telling import Telling


def test_recorded_steps_are_the_steps_of_an_eager_run():
    engine, graphed, recorder = opened(Net(), optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9))
    plain, *_ = opened(Net(), optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9))
    losses = []
    for step in range(9):
        losses.append(
            (graphed.run(share(step), step).loss.item(), plain._step.run(share(step), step).loss.item())
        )
    assert recorder.made[0].replays == 9 - WARM_UP - 1
    assert [a for a, _ in losses] == pytest.approx([b for _, b in losses], abs=1e-6)
    for name, value in plain.model.state_dict().items():
        torch.testing.assert_close(engine.model.state_dict()[name], value)
    assert graphed.notices == []


def test_outcomes_of_earlier_steps_keep_their_numbers():
    _, graphed, _ = opened(Net(), optimizer=partial(torch.optim.SGD, lr=0.5))
    outcomes = [graphed.run(share(step), step) for step in range(7)]
    seen = [outcome.loss.item() for outcome in outcomes]
    assert len(set(seen)) == 7


def test_an_outcome_in_one_vector_has_all_the_parts_of_one_taken_apart():
    parts = [torch.tensor(value) for value in (2.0, 3.0, [1.0, 1.0], [0.0, 2.0], [7.0, 7.0])]
    like = Outcome(*parts)
    packed = like.unpacked(like.packed() * 2)
    assert packed.pair.tolist() == [4.0, 6.0]
    assert (packed.loss.item(), packed.weight.item()) == (4.0, 6.0)
    assert [packed.losses.tolist(), packed.asked.tolist(), packed.calls.tolist()] == [
        [2, 2],
        [0, 4],
        [14, 14],
    ]
    assert packed.plus(torch.tensor(1.0)).pair.tolist() == [5.0, 6.0]
    untold = Outcome(*parts[:4])
    packed = untold.unpacked(untold.packed())
    assert packed.calls is None
    assert packed.asked.tolist() == [0, 2]
    alone = Outcome(*parts[:3])
    packed = alone.unpacked(alone.packed())
    assert packed.asked is packed.calls is None
    assert packed.loss.item() == 2.0


def test_a_step_that_tells_seldom_is_not_recorded():
    with pytest.raises(kway.UsageError, match="one in 4 tells"):
        opened(Net(), telling=Telling(4), optimizer=partial(torch.optim.SGD, lr=0.1))


def test_each_form_of_a_share_has_a_recording_of_its_own():
    _, graphed, recorder = opened(Net(), optimizer=partial(torch.optim.SGD, lr=0.1))
    for step in range(WARM_UP + 8):
        graphed.run(share(step, rows=6 if step % 2 else 4), step)
    assert len(recorder.made) == 2
    assert [made.replays for made in recorder.made] == [3, 3]


def test_more_forms_than_are_worth_it_are_taken_as_they_are():
    _, graphed, recorder = opened(Net(), optimizer=partial(torch.optim.SGD, lr=0.1))
    for step in range(WARM_UP + 2 * (MOST_FORMS + 3)):
        graphed.run(share(step, rows=2 + step // 2), step)
    assert len(recorder.made) == MOST_FORMS
    assert any("forms" in text for text in graphed.notices)


def test_a_schedule_is_followed_by_recorded_steps():
    schedule = partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5)
    sgd = partial(torch.optim.SGD, lr=1.0)
    engine, graphed, recorder = opened(nn.Linear(3, 2), optimizer=sgd, schedule=schedule)
    rates = []
    for step in range(6):
        before = engine.model.weight.detach().clone()
        graphed.run(share(step), step)
        moved = (before - engine.model.weight.detach()) / engine.model.weight.grad
        rates.append(moved.median().item())
    assert recorder.made[0].replays == 3
    assert rates == pytest.approx([1, 0.5, 0.25, 0.125, 0.0625, 0.03125], rel=1e-4)
    assert engine.optimizer.param_groups[0]["lr"] == 1.0 / 2**6


def test_an_option_that_changes_is_recorded_anew():
    engine, graphed, recorder = opened(
        nn.Linear(3, 2), optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.5)
    )
    for step in range(5):
        graphed.run(share(step), step)
    engine.optimizer.param_groups[0]["weight_decay"] = 0.3
    for step in range(5, 8):
        graphed.run(share(step), step)
    assert len(recorder.made) == 2


class Counting(Net):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.inner(x)


class Remembering(Net):
    def __init__(self):
        super().__init__()
        self.last = torch.zeros(2)

    def forward(self, x):
        out = self.inner(x)
        self.last = out.detach().mean(0)
        return out


class Listing(Net):
    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, x):
        self.seen = [*self.seen[-2:], float(len(self.seen))]
        return self.inner(x)


class Rolling(Net):
    def forward(self, x):
        return self.inner(x * torch.rand(()).item())


class Branching(Net):
    """Does other operations for other data, without a trace on the host."""

    def forward(self, x):
        return self.inner(x) * (2.0 if bool(x[0, 0] > 0) else 3.0)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Counting, "'calls'"), (Remembering, "'last'"), (Listing, "'seen'"), (Rolling, "random numbers on the host"),
        (Branching, "operation"),
    ],
)  # fmt: skip
def test_what_the_host_has_a_part_in_is_named_and_not_recorded(model, reason):
    _, graphed, recorder = opened(model(), optimizer=partial(torch.optim.SGD, lr=0.1))
    above = [n for n in range(40) if share(n).micro[0][0][0][0, 0] > 0]
    below = [n for n in range(40) if n not in above]
    for number, step in enumerate([*above[: WARM_UP + 1], *below[:4]]):
        graphed.run(share(step), number)
    assert all(made.replays == 0 for made in recorder.made)
    assert any(reason in text for text in graphed.notices), graphed.notices


def test_what_cannot_be_recorded_leaves_the_step_as_it_was():
    engine, graphed, recorder = opened(Net(), optimizer=partial(torch.optim.SGD, lr=0.1))
    plain, *_ = opened(Net(), optimizer=partial(torch.optim.SGD, lr=0.1))

    def fails(work, places):
        raise RuntimeError("operation not permitted when stream is capturing")

    recorder.record = fails
    for step in range(6):
        graphed.run(share(step), step)
        plain._step.run(share(step), step)
    assert "not permitted" in graphed.notices[0]
    for name, value in plain.model.state_dict().items():
        torch.testing.assert_close(engine.model.state_dict()[name], value)


class Own(torch.optim.SGD):
    __module__ = "mine"

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                with torch.no_grad():
                    parameter.sub_(group["lr"] * parameter.grad)


def test_an_optimizer_of_the_users_own_follows_the_recording():
    engine, graphed, recorder = opened(Net(), optimizer=partial(Own, lr=0.1))
    plain, *_ = opened(Net(), optimizer=partial(torch.optim.SGD, lr=0.1))
    for step in range(7):
        graphed.run(share(step), step)
        plain._step.run(share(step), step)
    assert recorder.made[0].replays == 4
    assert "Own" in graphed.notices[0]
    for name, value in plain.model.state_dict().items():
        torch.testing.assert_close(engine.model.state_dict()[name], value)


def test_metrics_and_penalty_count_in_recorded_steps():
    def right(output, target):
        return (output.argmax(1) == target).double()

    def penalty(model):
        return 0.01 * sum((p**2).sum() for p in model.parameters())

    options = {"metrics": {"right": right}, "penalty": penalty, "optimizer": partial(torch.optim.SGD, lr=0.1)}
    engine, graphed, recorder = opened(Net(), **options)
    plain, *_ = opened(Net(), **options)
    tallies = engine.tally(["right"]), plain.tally(["right"])
    for step in range(8):
        a = graphed.run(share(step), step, tallies[0])
        b = plain._step.run(share(step), step, tallies[1])
        assert a.loss.item() == pytest.approx(b.loss.item(), abs=1e-6)
    assert recorder.made[0].replays == 5
    group = engine.part.batch_group
    assert tallies[0].result(group) == tallies[1].result(group)
    assert tallies[0].result(group)["right"][1] == 48


@pytest.mark.parametrize(("level", "shards"), [("math", 1), ("bits", 2)])
def test_steps_whose_metrics_nobody_counts_are_recorded_without_them(level, shards):
    asked = []

    def metric(output, target):
        asked.append(len(output))
        return (output.argmax(1) == target).double()

    engine, graphed, recorder = opened(
        Net(), level, shards, optimizer=partial(torch.optim.SGD, lr=0.1), metrics={"m": metric}
    )
    for step in range(6):
        whole = share(step)
        (x, y), rows = whole.micro[0]
        size = rows // shards
        pieces = [((x[at : at + size], y[at : at + size]), size) for at in range(0, rows, size)]
        graphed.run(replace(whole, micro=pieces), step)
    assert recorder.made[0].replays == 3
    assert asked == []
    assert graphed.notices == []
    engine.close()


@pytest.mark.parametrize("draws", [True, False])
def test_keys_are_those_of_the_step_where_it_draws(draws, monkeypatch):
    # Of the device, which the double has none of.
    monkeypatch.setattr(Watched, "on_device", lambda self: draws)
    engine, graphed, recorder = opened(Net(), optimizer=partial(torch.optim.SGD, lr=0.1))
    for step in range(6):
        graphed.run(share(step), step)
    keys = [engine._step.keys(share(step), step) for step in (3, 4, 5)]
    assert recorder.made[0].keys == (keys if draws else [])


def test_nothing_that_was_recorded_outlives_the_run():
    _, graphed, recorder = opened(Net(), optimizer=partial(torch.optim.SGD, lr=0.1))
    for step in range(5):
        graphed.run(share(step), step)
    graphed.forget()
    assert recorder.made[0].closed
    graphed.run(share(5), 5)
    assert recorder.made[0].replays == 2


def test_a_frozen_parameter_makes_recordings_void():
    engine, graphed, recorder = opened(Net(), optimizer=partial(torch.optim.SGD, lr=0.1))
    for step in range(5):
        graphed.run(share(step), step)
    engine.model.inner[0].weight.requires_grad_(False)
    before = engine.model.inner[0].weight.detach().clone()
    for step in range(5, 10):
        graphed.run(share(step), step)
    assert len(recorder.made) == 2
    assert torch.equal(engine.model.inner[0].weight, before)


def test_what_ran_is_what_was_recorded_and_a_run_that_was_too_short_says_so():
    _, graphed, _ = opened(Net(), optimizer=partial(torch.optim.SGD, lr=0.1))
    assert (graphed.ran, graphed.at_the_end) == ("graph", [])
    for step in range(WARM_UP + 1):
        graphed.run(share(step), step)
        assert (graphed.ran, graphed.at_the_end, graphed.notices) == ("eager", [TOO_SHORT], [])
    graphed.run(share(WARM_UP + 1), WARM_UP + 1)
    assert (graphed.ran, graphed.at_the_end) == ("graph", [])


def as_recorded(monkeypatch):
    """Let a kind that records run on a CPU, with the double."""
    monkeypatch.setitem(KINDS, "graph", replace(KINDS["graph"], needs=None))
    of_device = GraphedStep.__init__

    def of_double(self, core, recorder=None, traced=True):
        of_device(self, core, Double(core.model, core.optimizer), traced)

    monkeypatch.setattr(GraphedStep, "__init__", of_double)


@pytest.mark.parametrize(("steps", "ran"), [(WARM_UP + 1, "eager"), (WARM_UP + 2, "graph")])
def test_records_name_a_kind_only_where_a_step_of_it_was_taken(steps, ran, monkeypatch):
    as_recorded(monkeypatch)
    job = kway.Job(
        partial(nn.Linear, 3, 2), nn.CrossEntropyLoss(), partial(torch.optim.SGD, lr=0.1),
        data=(torch.randn(60, 3), torch.arange(60) % 2), batch_size=6,
    )  # fmt: skip
    proof = kway.prove(job, devices="cpu:1", step_kind="graph", steps=steps)
    run = kway.train(job, devices="cpu:1", step_kind="graph", steps=steps)
    for record in (proof, run.record):
        assert record.step_kind == ran
        assert (TOO_SHORT in record.notices) == (ran == "eager")
