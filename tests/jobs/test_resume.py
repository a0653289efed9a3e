"""A run that was stopped and gone on with is the run that was never stopped."""

import json
from functools import partial

import pytest
import torch
from tests.jobs import resumable
from tests.jobs.resumable import EPOCHS, TRAINED, Net
from torch import nn

import kway
from kway.errors import RefusedError, UsageError

SAMPLES, BATCH = 110, 24
STEPS = 5  # an epoch


def data():
    draw = torch.Generator().manual_seed(5)
    return torch.rand(SAMPLES, 12, generator=draw), torch.randint(3, (SAMPLES,), generator=draw)


def job(**more):
    steps = partial(torch.optim.lr_scheduler.StepLR, step_size=4, gamma=0.5)
    return resumable.job(*data(), **{"batch_size": BATCH, "ema": 0.9, "schedule": steps, **more})


def bits(**more):
    return {**TRAINED, "exactness": "bits", "shards": 4, **more}


def told(record):
    """What must be the same: everything but times and how the run came about."""
    rows = [{k: v for k, v in row.items() if k not in ("seconds", "samples_per_s")} for row in record.epochs]
    return record.weights_sha256, record.ema_sha256, record.best, rows, record.steps


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return kway.train(job(), devices="cpu:1", out=tmp_path_factory.mktemp("whole") / "run", **bits())


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """Runs by their number of steps, to go on from elsewhere: nothing is written to them."""
    found = {steps: tmp_path_factory.mktemp("begun") / "run" for steps in (1, 8)}
    for steps, out in found.items():
        kway.train(job(), devices="cpu:1", out=out, steps=steps, checkpoint_every=f"{steps}steps", **TRAINED)
    return found


@pytest.mark.parametrize(
    ("stopped", "first", "second"),
    [(7, 1, 2), (7, 3, 1), (STEPS, 2, 3), (2 * STEPS, 1, 1), (1, 2, 4), (EPOCHS * STEPS, 1, 2)],
)
def test_bits_do_not_know_where_a_run_was_stopped_nor_on_how_many_devices(
    ranks, whole, tmp_path, stopped, first, second
):
    out = tmp_path / "run"
    kway.train(
        job(),
        devices=f"cpu:{first}",
        out=out,
        steps=stopped,
        checkpoint_every="1epochs",
        ranks=ranks,
        **bits(),
    )
    (out / "train.json").unlink()
    again = kway.train(
        job(),
        devices=f"cpu:{second}",
        out=out,
        resume=True,
        checkpoint_every="100steps",
        ranks=ranks,
        **bits(),
    )
    assert again.record.resumed_from_step == stopped
    assert told(again.record) == told(whole.record)


def test_a_step_inside_an_epoch_is_gone_on_from_at_math_too(ranks, tmp_path):
    plain = kway.train(job(), devices="cpu:2", **TRAINED, ranks=ranks)
    out = tmp_path / "run"
    kway.train(job(), devices="cpu:2", out=out, steps=8, checkpoint_every="3steps", ranks=ranks, **TRAINED)
    again = kway.train(
        job(),
        devices="cpu:2",
        out=tmp_path / "more",
        resume=out / "checkpoints" / "step-6",
        ranks=ranks,
        **TRAINED,
    )
    assert again.record.resumed_from_step == 6
    assert told(again.record) == told(plain.record)


def test_micro_batches_and_another_number_of_devices_see_the_same_samples(ranks, tmp_path):
    seen = {}

    class Noting(torch.utils.data.Dataset):
        def __len__(self):
            return SAMPLES

        def __getitem__(self, index):
            return data()[0][index], data()[1][index]

    model = partial(nn.Linear, 12, 3)
    plain = {"model": model, "ema": None, "micro_batch": 3, "data": Noting(), "workers": 1}
    for name, count, first in (("whole", 1, None), ("stopped", 2, 7)):
        out = tmp_path / name
        given = {"devices": f"cpu:{count}", "out": out, "epochs": 2, "ranks": ranks}
        run = kway.train(job(**plain), steps=first, checkpoint_every="7steps", **given)
        if first is not None:
            (out / "train.json").unlink()
            run = kway.train(job(**plain), resume=True, **given)
        seen[name] = run.model.state_dict()
    for name, value in seen["whole"].items():
        assert torch.allclose(value, seen["stopped"][name], atol=1e-6)


@pytest.mark.starts
@pytest.mark.usefixtures("forks")
def test_of_a_refused_run_nothing_stays_on_several_devices_either(begun, tmp_path):
    more = tmp_path / "more"
    other = job(optimizer=partial(torch.optim.Adam, lr=0.02))
    with pytest.raises(UsageError, match=r"now 0\.02"):
        kway.train(other, devices="cpu:2", out=more, resume=begun[1], echo=False, **TRAINED)
    assert not more.exists()
    run = kway.train(job(), devices="cpu:1", out=more, resume=begun[1], steps=2, **TRAINED)
    assert run.record.resumed_from_step == 1


def test_bits_are_not_gone_on_with_where_they_do_not_hold(tmp_path, monkeypatch):
    out = tmp_path / "run"
    kway.train(job(), devices="cpu:1", out=out, steps=1, checkpoint_every="1steps", **bits())
    monkeypatch.setattr("kway.strategies.engine.bits_hold_within", lambda *_, **__: {"torch": "another"})
    with pytest.raises(RefusedError, match="exactness math"):
        kway.train(job(), devices="cpu:1", out=tmp_path / "more", resume=out, **bits())
    other = {**TRAINED, "epochs": 1}
    again = kway.train(job(), devices="cpu:1", out=tmp_path / "math", resume=out, **other)
    assert any("at exactness bits" in line for line in again.record.notices)


def test_a_new_run_is_not_mixed_with_the_checkpoints_of_another(tmp_path):
    out = tmp_path / "run"
    kway.train(job(), devices="cpu:1", out=out, steps=1, checkpoint_every="1steps", **TRAINED)
    for name in ("train.json", "weights.safetensors", "ema.safetensors", "best.safetensors", "curves.png"):
        (out / name).unlink(missing_ok=True)
    with pytest.raises(UsageError, match="already holds checkpoints"):
        kway.train(job(), devices="cpu:1", out=out, **TRAINED)


def test_weights_of_a_checkpoint_are_those_of_a_bare_model(tmp_path):
    from safetensors.torch import load_file

    run = kway.train(
        job(), devices="cpu:1", out=tmp_path / "run", steps=3, checkpoint_every="3steps", **TRAINED
    )
    bare = Net()
    bare.load_state_dict(load_file(tmp_path / "run" / "checkpoints" / "step-3" / "weights.safetensors"))
    for name, value in run.model.state_dict().items():
        assert torch.equal(bare.state_dict()[name], value)


def test_a_loss_that_is_no_number_leaves_the_last_good_checkpoint(tmp_path):
    class Breaks(nn.CrossEntropyLoss):
        calls = 0

        def forward(self, output, target):
            Breaks.calls += 1
            return super().forward(output, target) * (torch.nan if Breaks.calls > 5 else 1)

    out = tmp_path / "run"
    broken = job(loss=Breaks(), validation=None)
    with pytest.raises(kway.NonFiniteError):
        kway.train(broken, devices="cpu:1", out=out, checkpoint_every="2steps", epochs=2)
    assert sorted(p.name for p in (out / "checkpoints").iterdir()) == ["step-2", "step-4"]


def test_what_keeps_checkpoints_from_being_saved_is_said_once_and_training_goes_on(tmp_path):
    out = tmp_path / "run"
    out.mkdir()
    (out / "checkpoints").symlink_to(tmp_path / "nowhere" / "at all")
    lines = []
    run = kway.train(
        job(),
        devices="cpu:1",
        out=out,
        resume=True,
        checkpoint_every="1steps",
        callbacks=[lambda event, record: lines.append(record["text"]) if event == "warning" else None],
        **TRAINED,
    )
    assert run.record.steps == EPOCHS * STEPS
    assert run.record.checkpoints["saved"] == 0
    assert run.record.checkpoints["failed"] > 1
    assert len(lines) == 1
    assert "was not written" in lines[0]


@pytest.mark.parametrize("value", ["0s", "-1steps", "soon", "2.5min", True, ""])
def test_an_interval_that_means_nothing_is_an_error(tmp_path, value):
    with pytest.raises(UsageError, match="checkpoint_every"):
        kway.train(job(), devices="cpu:1", out=tmp_path / "run", checkpoint_every=value)
    assert not (tmp_path / "run").exists()


def test_a_checkpoint_says_all_that_a_run_depends_on(tmp_path):
    out = tmp_path / "run"
    kway.train(job(), devices="cpu:1", out=out, steps=2, checkpoint_every="2steps", **TRAINED)
    folder = out / "checkpoints" / "step-2"
    parts = json.loads((folder / "manifest.json").read_text())["parts"]
    assert parts.keys() >= {"optimizer", "buffers", "schedule", "ema", "run", "job", "plan"}
    assert not [p for p in folder.iterdir() if p.suffix not in (".json", ".safetensors")]


def test_an_early_stop_comes_where_the_run_that_went_on_has_it(tmp_path):
    worse = job(optimizer=partial(torch.optim.SGD, lr=3.0), ema=None, schedule=None)
    given = bits(epochs=6, early_stop="accuracy", patience=2, validate_every="2steps", save_best=None)
    whole = kway.train(worse, devices="cpu:1", **given)
    assert whole.record.stopped_early
    for stopped in (2, whole.record.steps - 1, whole.record.steps):
        out = tmp_path / f"run-{stopped}"
        kway.train(
            worse, devices="cpu:1", out=out, checkpoint_every="100steps", **{**given, "steps": stopped}
        )
        again = kway.train(worse, devices="cpu:1", out=tmp_path / f"more-{stopped}", resume=out, **given)
        assert again.record.stopped_early
        assert again.record.weights_sha256 == whole.record.weights_sha256
        assert again.record.steps == whole.record.steps


@pytest.mark.parametrize(("more", "words"), [({"steps": 6}, "at step 8"), ({"epochs": 1}, "in epoch 2")])
def test_a_run_that_would_end_before_its_checkpoint_is_refused(begun, tmp_path, more, words):
    out = begun[8]
    before = (out / "checkpoints" / "step-8" / "manifest.json").read_bytes()
    with pytest.raises(UsageError, match=words):
        kway.train(job(), devices="cpu:1", out=tmp_path / "more", resume=out, **{**TRAINED, **more})
    assert (out / "checkpoints" / "step-8" / "manifest.json").read_bytes() == before


def test_the_folder_of_another_run_is_not_taken_for_ones_own(tmp_path):
    for name in ("a", "b"):
        kway.train(job(), devices="cpu:1", out=tmp_path / name, steps=2, checkpoint_every="1steps", **TRAINED)
    (tmp_path / "b" / "train.json").unlink()
    with pytest.raises(UsageError, match="already holds"):
        kway.train(job(), devices="cpu:1", out=tmp_path / "b", resume=tmp_path / "a", **TRAINED)


def test_best_weights_on_a_full_disk_end_no_run(tmp_path):
    out = tmp_path / "run"
    out.mkdir()
    (out / "best.safetensors").mkdir()
    run = kway.train(
        job(), devices="cpu:1", out=out, resume=True, steps=5, checkpoint_every="5steps", **TRAINED
    )
    assert any("best weights so far" in line for line in run.record.notices)
    assert run.record.checkpoints["saved"] == 1


@pytest.mark.parametrize(
    ("devices", "more", "words"),
    [
        ("cpu:1", {"max_restarts": 1}, "too few are left"),
        ("cpu:2", {"max_restarts": 1, "min_devices": 2}, "too few are left"),
        ("cpu:2", {"max_restarts": -1}, "max_restarts=-1"),
        ("cpu:2", {"min_devices": 0}, "min_devices=0"),
        ("cpu:2", {"min_devices": 2}, "without max_restarts"),
        ("cpu:1", {"keep": 2}, "nothing to keep"),
        ("cpu:1", {"keep": 0, "checkpoint_every": 1}, "keep=0"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(tmp_path, devices, more, words):
    with pytest.raises(UsageError, match=words):
        kway.train(job(), devices=devices, out=tmp_path / "run", **TRAINED, **more)
    assert not (tmp_path / "run").exists()


def test_a_schedule_with_milestones_goes_on(tmp_path):
    stepped = job(schedule=partial(torch.optim.lr_scheduler.MultiStepLR, milestones=[3, 9, 9], gamma=0.5))
    whole = kway.train(stepped, devices="cpu:1", out=tmp_path / "whole", **bits())
    kway.train(stepped, devices="cpu:1", out=tmp_path / "run", steps=4, checkpoint_every="2steps", **bits())
    again = kway.train(stepped, devices="cpu:1", out=tmp_path / "again", resume=tmp_path / "run", **bits())
    assert told(again.record) == told(whole.record)


def test_a_named_run_without_a_whole_checkpoint_is_an_error_and_leaves_nothing(tmp_path):
    (tmp_path / "run" / "checkpoints" / "step-3").mkdir(parents=True)
    for named in (tmp_path / "run", tmp_path / "run" / "checkpoints" / "step-3"):
        with pytest.raises(UsageError, match="holds no complete checkpoint"):
            kway.train(job(), devices="cpu:1", out=tmp_path / "new", resume=named)
    assert not (tmp_path / "new").exists()


def test_a_checkpoint_under_the_name_of_another_step_is_refused(tmp_path):
    kway.train(job(), devices="cpu:1", out=tmp_path / "run", steps=2, checkpoint_every="2steps", **bits())
    named = (tmp_path / "run" / "checkpoints" / "step-2").rename(tmp_path / "step-20")
    with pytest.raises(UsageError, match="step-20: its manifest says step 2: its name says 20"):
        kway.train(job(), devices="cpu:1", out=tmp_path / "new", resume=named, **bits())
    assert not (tmp_path / "new").exists()
    # Under a name of the user's own it may be kept.
    other = named.rename(tmp_path / "good")
    again = kway.train(job(), devices="cpu:1", out=tmp_path / "new", resume=other, steps=4, **bits())
    assert again.record.resumed_from_step == 2


@pytest.mark.parametrize("resume", [None, 1, ""])
def test_what_is_no_place_to_go_on_from_is_refused(tmp_path, resume):
    with pytest.raises(UsageError, match="resume="):
        kway.train(job(), devices="cpu:1", out=tmp_path / "new", resume=resume)


@pytest.mark.parametrize("every", [2, "4steps"])
def test_a_run_that_is_asked_for_more_epochs_is_the_run_that_had_them_from_the_start(tmp_path, every):
    plateau = partial(torch.optim.lr_scheduler.ReduceLROnPlateau, patience=0, factor=0.5)
    given = {**bits(epochs=4, validate_every=every), "devices": "cpu:1"}
    whole = kway.train(job(schedule=plateau), **given)
    out = tmp_path / "run"
    kway.train(job(schedule=plateau), out=out, checkpoint_every=1, **{**given, "epochs": 1})
    again = kway.train(job(schedule=plateau), out=tmp_path / "more", resume=out, **given)
    assert told(again.record) == told(whole.record)


class Grows(nn.Module):
    """Has a buffer, in no weights file, that is made when the model is first used."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(12, 3)
        self.register_buffer("scale", None, persistent=False)

    def forward(self, x):
        if self.scale is None:
            self.scale = torch.ones(3, device=x.device)
        return self.layer(x) * self.scale


def test_a_buffer_that_appears_when_the_model_is_used_is_gone_on_with(tmp_path):
    given = {**TRAINED, "devices": "cpu:1"}
    whole = kway.train(job(model=Grows), **given)
    out = tmp_path / "run"
    kway.train(job(model=Grows), out=out, steps=7, checkpoint_every="7steps", **given)
    assert told(kway.train(job(model=Grows), out=tmp_path / "more", resume=out, **given).record) == told(
        whole.record
    )


def test_the_folder_of_a_run_that_has_ended_names_what_to_do(tmp_path):
    out = tmp_path / "run"
    kway.train(job(), devices="cpu:1", out=out, steps=2, checkpoint_every="1steps", **TRAINED)
    with pytest.raises(UsageError, match="resume-from"):
        kway.train(job(), devices="cpu:1", out=out, resume=True, **TRAINED)


def table():
    return nn.Sequential(nn.Embedding(9, 3, sparse=True), nn.Flatten(), nn.Linear(6, 2)).double()


def test_momentum_of_a_sparse_table_is_gone_on_with(tmp_path):
    tokens = torch.randint(9, (20, 2), generator=torch.Generator().manual_seed(1))
    sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    job = kway.Job(
        model=table, loss=nn.CrossEntropyLoss(), optimizer=sgd, data=(tokens, tokens[:, 0] % 2), batch_size=4,
        precision="fp64", name="table",
    )  # fmt: skip
    options = {"devices": "cpu", "echo": False, "checkpoint_every": "2steps"}
    whole = kway.train(job, epochs=2, out=tmp_path / "whole", **options)
    kway.train(job, epochs=2, steps=4, out=tmp_path / "run", **options)
    resumed = kway.train(job, epochs=2, out=tmp_path / "more", resume=tmp_path / "run", **options)
    assert resumed.record.weights_sha256 == whole.record.weights_sha256
