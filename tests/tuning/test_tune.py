"""``kway.tune`` and tuned runs, on CPU ranks."""

import json
from functools import partial

import pytest
import torch
from torch import nn

import kway
from kway.tuning import trial

G = torch.Generator().manual_seed(0)
X, Y = torch.randn(64, 1, 6, 6, generator=G), torch.arange(64) % 3
SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)


def net():
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))


def job(model=net, **more):
    return kway.Job(model, nn.CrossEntropyLoss(), SGD, **{"data": (X, Y), "batch_size": 16, **more})


@pytest.fixture(autouse=True)
def short(monkeypatch, tmp_path):
    """A cache of its own, windows of two steps, one thread and no compiler: what is timed is no test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(trial, "WINDOW_S", 0.0)
    monkeypatch.setattr("kway.jobs.place.rank_threads", lambda device_set: 1)
    monkeypatch.setenv("CXX", "no-such-compiler")


def made_fast(monkeypatch, wanted):
    """Let the choice ``wanted`` be twice as fast as it is, by the clock of the search alone."""
    windows = trial.Trials._windows

    def shorter(self, engine, shares):
        found, waits = windows(self, engine, shares)
        fast = engine.settings.named() == wanted
        return [0.001 if fast else 0.002 for _ in found], waits

    monkeypatch.setattr(trial.Trials, "_windows", shorter)


def test_the_fastest_that_agrees_is_chosen_and_the_next_run_knows_it(monkeypatch, tmp_path):
    made_fast(monkeypatch, {"optimizer": "fused"})
    record = kway.tune(job(), devices="cpu:1")
    assert (record.how, record.choice) == ("measured", {"optimizer": "fused"})
    assert [row["choice"] for row in record.rows][:2] == [{}, {"memory_format": "channels_last"}]
    chosen = [row for row in record.rows if row["choice"] == record.choice]
    assert (chosen[0]["verdict"], chosen[0]["ratio"]) == ("chosen", 0.5)
    assert record.chosen_step_s == 0.001

    again = kway.tune(job(), devices="cpu:1")
    assert (again.how, again.choice, again.rows) == ("remembered", record.choice, [])
    run = kway.train(job(), devices="cpu:1", epochs=1)
    assert run.record.settings == {"optimizer": "fused"}
    assert run.record.tuned["how"] == "remembered"
    assert run.record.job["optimizer"]["groups"][0]["fused"] is True
    # Another batch is another question, and so is a run that is not to be tuned.
    other = kway.train(job(batch_size=32), devices="cpu:1", epochs=1)
    assert (other.record.settings, other.record.tuned["how"]) == ({}, "left")
    assert kway.train(job(), devices="cpu:1", epochs=1, tune=False).record.tuned is None


def test_trials_leave_model_random_state_and_result_alone(monkeypatch):
    made_fast(monkeypatch, {"memory_format": "channels_last"})
    plain = kway.train(job(), devices="cpu:1", epochs=2, tune=False)
    model = net()
    model.load_state_dict(plain.model.state_dict())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(5)
    kway.tune(job(model), devices="cpu:1", seconds=30)
    drawn = torch.rand(1)
    torch.manual_seed(5)
    assert torch.equal(drawn, torch.rand(1))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model[0].weight.stride() == net()[0].weight.stride()

    tuned = kway.train(job(), devices="cpu:1", epochs=2, tune_seconds=30)
    assert tuned.record.tuned["choice"] == {"memory_format": "channels_last"}
    for name, value in plain.model.state_dict().items():
        torch.testing.assert_close(tuned.model.state_dict()[name], value, rtol=0, atol=1e-5)
        assert tuned.model.state_dict()[name].stride() == value.stride()


def test_a_candidate_that_computes_something_else_is_discarded(monkeypatch):
    made_fast(monkeypatch, {"optimizer": "fused"})
    prefer = trial.Settings.prefer

    def wrong(self, optimizer):
        if self.optimizer == "fused":
            optimizer.param_groups[0]["lr"] *= 1.01
        return prefer(self, optimizer)

    monkeypatch.setattr(trial.Settings, "prefer", wrong)
    record = kway.tune(job(), devices="cpu:1")
    verdict = next(row["verdict"] for row in record.rows if row["choice"] == {"optimizer": "fused"})
    assert verdict.startswith("discarded: ")
    assert record.choice == {}


@pytest.mark.usefixtures("forks")
def test_two_ranks_agree_on_a_choice():
    record = kway.tune(job(), devices="cpu:2", seconds=20)
    assert record.how == "measured"
    assert [row["verdict"] for row in record.rows].count("chosen") >= 1
    run = kway.train(job(), devices="cpu:2", epochs=1)
    assert run.record.tuned["choice"] == record.choice


@pytest.mark.usefixtures("forks")
def test_bits_are_tuned_only_when_asked_and_say_with_what_they_hold(monkeypatch):
    made_fast(monkeypatch, {"memory_format": "channels_last"})
    plain = kway.train(job(), devices="cpu:1", epochs=1, exactness="bits", shards=4)
    assert (plain.record.tuned, plain.record.holds_within["settings"]) == (None, None)
    tuned = kway.train(job(), devices="cpu:1", epochs=1, exactness="bits", shards=4, tune_seconds=20)
    assert tuned.record.holds_within["settings"] == {"memory_format": "channels_last"}
    # Chosen on one shard: what is remembered holds on two devices as well.
    two = kway.train(job(), devices="cpu:2", epochs=1, exactness="bits", shards=4, tune_seconds=20)
    assert two.record.tuned["how"] == "remembered"
    assert two.record.weights_sha256 == tuned.record.weights_sha256


def test_a_run_that_goes_on_runs_as_it_was_begun(tmp_path):
    settings = {"optimizer": "fused", "memory_format": "channels_last"}
    begun = {"devices": "cpu:1", "out": tmp_path / "run", "checkpoint_every": 1, "settings": settings}
    kway.train(job(), epochs=1, **begun)
    on = kway.train(job(), devices="cpu:1", epochs=2, resume=tmp_path / "run")
    assert on.record.settings == settings
    whole = kway.train(job(), devices="cpu:1", epochs=2, settings=settings)
    assert on.record.weights_sha256 == whole.record.weights_sha256


def test_long_runs_are_tuned_by_themselves_and_short_ones_left(monkeypatch):
    made_fast(monkeypatch, {"optimizer": "foreach"})
    assert kway.train(job(), devices="cpu:1", steps=3, epochs=1).record.tuned["how"] == "left"
    monkeypatch.setattr("kway.tuning.run.LEAST_STEPS", 4)
    monkeypatch.setattr("kway.tuning.run.PART", 1e9)
    run = kway.train(job(), devices="cpu:1", epochs=1)
    assert run.record.tuned["how"] == "measured"
    assert run.record.settings == {"optimizer": "foreach"}


def test_no_budget_is_left_means_that_nothing_more_is_tried(monkeypatch):
    made_fast(monkeypatch, {"optimizer": "foreach"})
    monkeypatch.setattr("kway.tuning.run.LEAST_STEPS", 4)
    run = kway.train(job(), devices="cpu:1", epochs=1)
    # A twentieth of four steps.
    assert (run.record.tuned["how"], run.record.settings) == ("left", {})
    assert "22 steps" in run.record.tuned["why"]
    asked = kway.tune(job(), devices="cpu:1", seconds=1e-9)
    assert (asked.how, asked.rows) == ("left", [])


class Dropping(nn.Sequential):
    """Drops out, and is wrong when ``wrong`` is set on the class."""

    wrong = 1.0

    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(36, 8), nn.Dropout(0.5), nn.Linear(8, 3))

    def forward(self, x):
        return super().forward(x) * self.wrong


def test_dropout_hides_nothing(monkeypatch):
    made_fast(monkeypatch, {"optimizer": "fused"})
    record = kway.tune(job(Dropping), devices="cpu:1")
    assert record.choice == {"optimizer": "fused"}
    in_torch = trial.Settings.in_torch

    def wrong(self, model, device):
        monkeypatch.setattr(Dropping, "wrong", 1.001 if self.optimizer == "fused" else 1.0)
        return in_torch(self, model, device)

    monkeypatch.setattr(trial.Settings, "in_torch", wrong)
    again = kway.tune(job(Dropping), devices="cpu:1", refresh=True)
    verdict = next(row["verdict"] for row in again.rows if row["choice"] == {"optimizer": "fused"})
    assert verdict.startswith("discarded")


class Noisy(nn.Linear):
    def forward(self, x):
        return super().forward(x.flatten(1) + torch.rand(()))


class NoCopy(nn.Linear):
    def __deepcopy__(self, memo):
        raise RuntimeError("only one of these")

    def forward(self, x):
        return super().forward(x.flatten(1))


def ordered():
    dataset = torch.utils.data.TensorDataset(X, Y)
    batches = [[*range(start, start + 16)] for start in range(0, 64, 16)]
    return torch.utils.data.DataLoader(dataset, batch_sampler=batches)


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        yield from zip(X, Y, strict=True)


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"data": Stream()}, "stream"),
        ({"batch_size": 65}, "no whole batch"),
        ({"model": partial(Noisy, 36, 3)}, "random numbers"),
        ({"model": partial(NoCopy, 36, 3)}, "cannot be copied (RuntimeError: only one of these)"),
        ({"data": ordered(), "batch_size": None}, "sampler of the user's own"),
    ],
)
def test_what_cannot_be_measured_is_left_with_the_reason(more, why):
    record = kway.tune(job(**more), devices="cpu:1")
    assert record.how == "left"
    assert why in record.why
    assert kway.train(job(**more), devices="cpu:1", steps=1, epochs=1, tune_seconds=5).record.steps == 1


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"tune_seconds": 0}, "tune_seconds=0"),
        ({"tune_seconds": 5, "tune": False}, "leave one out"),
        ({"settings": {"optimizr": "fused"}}, "did you mean 'optimizer'"),
    ],
)
def test_bad_wishes_are_one_error(more, said):
    with pytest.raises(kway.UsageError, match=said):
        kway.train(job(), devices="cpu:1", epochs=1, **more)


def test_what_one_model_was_given_another_of_the_same_shape_is_not(monkeypatch):
    made_fast(monkeypatch, {"optimizer": "fused"})
    kway.tune(job(), devices="cpu:1")
    other = kway.Job(net, nn.CrossEntropyLoss(), partial(torch.optim.AdamW, lr=0.1), (X, Y), batch_size=16)
    squared = job(metrics={"square": lambda output, target: (output**2).mean(1)})
    for changed in (other, squared, job(data=(X.double(), Y), precision="fp64")):
        assert kway.train(changed, devices="cpu:1", steps=1, epochs=1).record.tuned["how"] == "left"
    assert kway.train(job(), devices="cpu:1", steps=1, epochs=1).record.tuned["how"] == "remembered"


def test_what_was_left_out_for_want_of_time_is_tried_when_there_is_more(monkeypatch):
    made_fast(monkeypatch, {"optimizer": "fused"})
    monkeypatch.setattr("kway.tuning.run._Budget.cost", lambda self, choice: 5.0)
    short = kway.tune(job(), devices="cpu:1", seconds=4.5)
    assert any(row["verdict"].startswith("not tried") for row in short.rows)
    assert kway.train(job(), devices="cpu:1", steps=1, epochs=1).record.tuned["how"] == "remembered"
    assert kway.tune(job(), devices="cpu:1", seconds=4).how == "remembered"
    assert kway.tune(job(), devices="cpu:1", seconds=60).how == "measured"


@pytest.mark.usefixtures("forks")
def test_a_rank_that_fails_alone_ends_the_run_and_leaves_nobody_waiting():
    with pytest.raises(kway.KwayError, match="tune=False"):
        kway.train(job(Breaks), devices="cpu:2", epochs=1, tune_seconds=20, stall_timeout="20s")


class Breaks(nn.Module):
    """Fails on rank 1 as soon as its weights lie otherwise than at first."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(64, 3))

    def forward(self, x):
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        if rank == 1 and not self.layers[0].weight.is_contiguous():
            raise RuntimeError("rank 1 alone")
        return self.layers(torch.cat([x, x], 1))


def test_a_choice_that_was_kept_by_another_program_is_not_believed(monkeypatch, tmp_path):
    made_fast(monkeypatch, {"optimizer": "fused"})
    kway.tune(job(), devices="cpu:1")
    file = next((tmp_path / "cache/kway/tuned").iterdir())
    held = json.loads(file.read_text())
    file.write_text(json.dumps({**held, "choice": {"optimizer": "nonsense"}}))
    assert kway.tune(job(), devices="cpu:1").how == "measured"
    file.write_text("{")
    assert kway.tune(job(), devices="cpu:1", refresh=True).how == "measured"
