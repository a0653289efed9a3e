"""``kway.tune`` and tuned runs, on CPU ranks."""

import json
from functools import partial
from types import FunctionType

import pytest
import torch
from torch import nn

import kway
from kway.step.settings import Settings
from kway.tuning import run, trial
from kway.tuning.code import code_of

pytestmark = pytest.mark.usefixtures("short")

G = torch.Generator().manual_seed(0)
X, Y = torch.randn(64, 1, 6, 6, generator=G), torch.arange(64) % 3
SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)


def net():
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))


def job(model=net, **more):
    return kway.Job(model, nn.CrossEntropyLoss(), SGD, **{"data": (X, Y), "batch_size": 16, **more})


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
    prefer = Settings.prefer

    def wrong(self, optimizer):
        if self.optimizer == "fused":
            optimizer.param_groups[0]["lr"] *= 1.01
        return prefer(self, optimizer)

    monkeypatch.setattr(Settings, "prefer", wrong)
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
    assert "no time" in run.record.tuned["why"]
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
    in_torch = Settings.in_torch

    def wrong(self, model, device):
        monkeypatch.setattr(Dropping, "wrong", 1.001 if self.optimizer == "fused" else 1.0)
        return in_torch(self, model, device)

    monkeypatch.setattr(Settings, "in_torch", wrong)
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
        ({"model": NoCopy(36, 3)}, "cannot be copied (RuntimeError: only one of these)"),
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
        ({"tune_seconds": 10**5000}, r"tune_seconds=1e\+5000 or more"),
        ({"tune": "no"}, "tune='no': it must be True or False"),
        ({"tune": None}, "tune=None"),
        ({"settings": {"optimizr": "fused"}}, "did you mean 'optimizer'"),
        ({"settings": {"bucket_mib": 10**400}}, r"bucket_mib=1e\+400 or more"),
        ({"settings": {"micro_batch": 1.5}}, "micro_batch=1.5: it must be a whole number of at least 1"),
    ],
)
def test_bad_wishes_are_one_error(more, said):
    with pytest.raises(kway.UsageError, match=said) as raised:
        kway.train(job(), devices="cpu:1", epochs=1, **more)
    assert len(str(raised.value)) < 250


@pytest.mark.parametrize(
    "more", [{"seconds": 0}, {"allow": 5}, {"allow": None}, {"allow": [1]}, {"say": 3}, {"refresh": "x"}]
)
def test_bad_wishes_of_a_tuning_are_one_error_that_names_them(more):
    named = "unknown precision '1'" if more == {"allow": [1]} else f"{next(iter(more))}="
    with pytest.raises(kway.UsageError, match=f"^{named}"):
        kway.tune(job(), devices="cpu:1", **more)


def test_a_setting_that_is_none_is_left_to_kway():
    run = kway.train(job(), devices="cpu:1", steps=1, epochs=1, settings={"threads": None})
    assert run.record.settings == {}


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


def test_a_choice_that_was_kept_by_another_program_is_not_believed(monkeypatch, tmp_path):
    made_fast(monkeypatch, {"optimizer": "fused"})
    kway.tune(job(), devices="cpu:1")
    file = next((tmp_path / "cache/kway/tuned").iterdir())
    held = json.loads(file.read_text())
    file.write_text(json.dumps({**held, "choice": {"optimizer": "nonsense"}}))
    assert kway.tune(job(), devices="cpu:1").how == "measured"
    file.write_text("{")
    assert kway.tune(job(), devices="cpu:1", refresh=True).how == "measured"


class Embeds(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.last = nn.Embedding(64, 4, sparse=True), nn.Linear(4, 3)

    def forward(self, number):
        return self.last(self.table(number))


@pytest.mark.usefixtures("forks")
def test_fused_is_not_tried_where_gradients_are_sparse():
    plain = partial(torch.optim.SGD, lr=0.05)
    rows = kway.Job(Embeds, nn.CrossEntropyLoss(), plain, (torch.arange(64), Y), batch_size=16)
    record = kway.tune(rows, devices="cpu:2", seconds=20)
    assert record.how == "measured"
    tried = [row["choice"].get("optimizer") for row in record.rows]
    assert "fused" not in tried
    assert "foreach" in tried


class Counting:
    """A penalty and a metric that counts how often it was asked, and makes its answer of that."""

    def __init__(self):
        self.asked = 0

    def __call__(self, *given):
        self.asked += 1
        return given[0].new_zeros(16) + self.asked if len(given) == 2 else torch.tensor(0.1 * self.asked)


def test_what_counts_beside_the_model_is_not_asked_in_trials(monkeypatch):
    made_fast(monkeypatch, {})
    beside = {"penalty": Counting(), "metrics": {"asked": Counting()}}
    assert kway.tune(job(**beside), devices="cpu:1").how == "measured"
    assert (beside["penalty"].asked, beside["metrics"]["asked"].asked) == (0, 0)


def test_a_penalty_of_the_model_itself_is_that_of_its_copy_in_trials(monkeypatch):
    made_fast(monkeypatch, {})
    model = Penalised()
    assert kway.tune(job(model, penalty=model.penalty), devices="cpu:1").how == "measured"
    assert model.last.weight.grad is None


class Penalised(nn.Module):
    def __init__(self):
        super().__init__()
        self.last = nn.Linear(36, 3)

    def penalty(self, model):
        return self.last.weight.square().sum()

    def forward(self, x):
        return self.last(x.flatten(1))


def subject_here(monkeypatch, job, seconds=20.0, **more):
    """Return the subject of a tuning, what was asked of the budget for each choice, and the trials."""
    seen = {}
    plain = run.search

    def search(stages, measure, cost, again, left, start):
        seen["cost"] = cost
        return plain([], measure, cost, again, left, start)

    monkeypatch.setattr(run, "stages", lambda subject: seen.update(subject=subject) or [])
    monkeypatch.setattr(run, "search", search)
    kway.tune(job, devices="cpu:1", seconds=seconds, refresh=True, **more)
    return seen


def test_shares_are_cut_only_where_the_result_stays(monkeypatch):
    with_norm = job(partial(nn.Sequential, nn.Flatten(), nn.BatchNorm1d(36), nn.Linear(36, 3)))
    for level in ("math", "loose"):
        assert subject_here(monkeypatch, job(), exactness=level)["subject"].may_be_cut
        assert not subject_here(monkeypatch, with_norm, exactness=level)["subject"].may_be_cut


def test_a_precision_costs_what_it_is_compared_with_too(monkeypatch):
    cost = subject_here(monkeypatch, job(), allow=["bf16"])["cost"]
    assert cost({"precision": "bf16"}) > cost({}) == cost({"optimizer": "foreach"})


def scaled(by, around):
    def penalty(model, half=by):
        return around * half

    return penalty


def test_code_is_told_apart_by_what_is_given_to_it_and_not_by_the_order_of_a_set():
    told = [code_of(scaled(by, around)) for by, around in ((1, 1), (2, 1), (1, 2), (1, scaled), (1, code_of))]
    assert len(set(told)) == len(told)
    code = scaled.__code__
    one, other = (code.replace(co_consts=(*code.co_consts, (1, frozenset(of)))) for of in ([0, 8], [8, 0]))
    assert code_of(FunctionType(one, {})) == code_of(FunctionType(other, {}))
    assert code_of(FunctionType(one, {})) != code_of(FunctionType(code, {}))


def test_clipping_and_averaging_are_other_questions(monkeypatch):
    made_fast(monkeypatch, {"optimizer": "fused"})
    kway.tune(job(), devices="cpu:1")
    for changed in (job(clip=1.0), job(ema=0.9)):
        assert kway.train(changed, devices="cpu:1", steps=1, epochs=1).record.tuned["how"] == "left"
