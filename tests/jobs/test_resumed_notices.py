"""A run that goes on where something is not as it was says what."""

import pytest
import torch
from tests.jobs import resumable
from tests.jobs.resumable import TRAINED, Net
from torch import nn

import kway

X = torch.rand(60, 12, generator=torch.Generator().manual_seed(5))
Y = torch.arange(60) % 3


class NoNorm(Net):
    def __init__(self):
        super().__init__()
        self.norm = nn.Identity()


class NoDrop(Net):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.0)


class Buffered(Net):
    def __init__(self):
        super().__init__()
        self.register_buffer("more", torch.ones(()), persistent=False)


def job(**more):
    return resumable.job(X, Y, **more)


def ranked(ranks, tmp_path, **more):
    """A run on two devices to go on from."""
    out = tmp_path / "ranked"
    kway.train(
        job(**more), devices="cpu:2", out=out, steps=2, checkpoint_every="1steps", ranks=ranks, **TRAINED
    )
    return out


def test_what_another_number_of_devices_changes_at_math_is_said(ranks, tmp_path):
    out = tmp_path / "run"
    kway.train(job(), devices="cpu:1", out=out, steps=2, checkpoint_every="1steps", **TRAINED)
    again = kway.train(
        job(), devices="cpu:2", out=tmp_path / "more", resume=out, steps=3, ranks=ranks, **TRAINED
    )
    assert any("on 2 devices instead of 1 other masks" in line for line in again.record.notices)
    back = kway.train(job(), devices="cpu:1", resume=ranked(ranks, tmp_path), steps=3, **TRAINED)
    assert any("on 1 device instead of 2 other masks" in line for line in back.record.notices)


def test_a_model_that_draws_no_random_numbers_is_told_of_none(ranks, tmp_path):
    out = ranked(ranks, tmp_path, model=NoDrop)
    again = kway.train(job(model=NoDrop), devices="cpu:1", resume=out, steps=3, **TRAINED)
    assert again.record.resumed_from_step == 2
    assert not any("masks" in line for line in again.record.notices)


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """Two steps of the job with each model, to go on from elsewhere."""
    found = {}
    for model in (Net, NoNorm):
        found[model] = tmp_path_factory.mktemp("begun") / "run"
        given = {"steps": 2, "checkpoint_every": "1steps", **TRAINED}
        kway.train(job(model=model), devices="cpu:1", out=found[model], **given)
    return found


@pytest.mark.parametrize(
    ("change", "given", "words"),
    [
        ({}, {}, None),
        ({"validation": (torch.rand(30, 12), torch.arange(30) % 3)}, {}, "validation data 30 of"),
        ({"metrics": {}}, {"save_best": None}, "metrics accuracy, now none; save_best accuracy, now none"),
        ({"model": Buffered}, {}, "buffers beside the weights seen, now more, seen"),
        ({}, {"patience": 7}, "patience 50, now 7"),
        ({"model": NoNorm, "micro_batch": 5}, {}, "micro_batch none, now 5 (other micro-batches round"),
    ],
    ids=["nothing", "validation", "metrics", "buffer", "patience", "micro-batch"],
)
def test_what_may_change_when_a_run_goes_on_is_said(begun, change, given, words):
    first = begun[change.get("model", Net) if "micro_batch" in change else Net]
    asked = {**TRAINED, "resume": first, "steps": 3, **given}
    again = kway.train(job(**change), devices="cpu:1", **asked)
    said = [line for line in again.record.notices if line.startswith("goes on otherwise than up to step 2: ")]
    assert len(said) == (words is not None)
    assert words is None or words in said[0]


def test_without_a_checkpoint_a_run_starts_anew_and_says_so(tmp_path):
    run = kway.train(job(), devices="cpu:1", out=tmp_path / "run", steps=2, resume=True, **TRAINED)
    assert run.record.resumed_from_step is None
    assert any("starts anew" in line for line in run.record.notices)


def test_best_weights_of_a_later_step_are_not_brought_along(tmp_path):
    out = tmp_path / "run"
    kway.train(job(), devices="cpu:1", out=out, steps=4, checkpoint_every="4steps", **TRAINED)
    (out / "best.safetensors").write_bytes(b"of a later step")
    run = kway.train(job(), devices="cpu:1", out=tmp_path / "more", resume=out, steps=6, **TRAINED)
    assert any("best begins anew" in line for line in run.record.notices)
    assert (tmp_path / "more" / "best.safetensors").stat().st_size > 100


def test_what_is_known_before_the_first_step_is_said_before_it(tmp_path):
    kway.train(job(), devices="cpu:1", out=tmp_path / "a", steps=2, checkpoint_every="1steps", **TRAINED)
    seen = []
    given = {**TRAINED, "patience": 7, "resume": tmp_path / "a", "steps": 4, "log_every": 1}
    tell = lambda event, record: seen.append((event, record.get("text")))  # noqa: E731
    again = kway.train(job(), devices="cpu:1", **given, callbacks=[tell])
    names = [event for event, _ in seen]
    said = [text for event, text in seen if event == "notice"]
    assert names.index("start") < names.index("notice") < names.index("step")
    assert any("patience 50, now 7" in text for text in said)
    assert set(said) <= set(again.record.notices)


@pytest.mark.parametrize("size", [1, 2])
def test_what_is_known_of_held_out_data_and_of_how_steps_run_is_said_before_the_first_one(
    ranks, monkeypatch, size
):
    # Reaches the run on one device, which is in this process.
    monkeypatch.setattr("kway.step.kinds.missing", lambda kind: "no compiler")
    held = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y), batch_size=8, drop_last=True)
    seen = []
    tell = lambda event, record: seen.append((event, record.get("text")))  # noqa: E731
    more = {"step_kind": "compiled"} if size == 1 else {"ranks": ranks}
    run = kway.train(
        job(validation=held),
        devices=f"cpu:{size}",
        **{**TRAINED, "log_every": 1, **more},
        steps=2,
        callbacks=[tell],
    )
    before = [text for event, text in seen[: [event for event, _ in seen].index("step")] if event == "notice"]
    assert len([text for text in before if text.startswith("validation data: ")]) == 1
    assert ("the model is not compiled: no compiler" in before) == (size == 1)
    assert set(before) <= set(run.record.notices)
    assert len(run.record.notices) == len(set(run.record.notices))


def test_an_epoch_of_which_every_step_was_taken_before_says_so(ranks, tmp_path):
    heard = []
    given = {"devices": "cpu:1", "ranks": ranks, "checkpoint_every": 1, "tune": False}
    kway.train(job(), out=tmp_path / "run", epochs=1, **given)
    callbacks = [lambda event, record: heard.append(record) if event == "epoch" else None]
    kway.train(job(), out=tmp_path / "on", epochs=2, resume=tmp_path / "run", callbacks=callbacks, **given)
    assert [(row["epoch"], row.get("earlier", False)) for row in heard] == [(1, True), (2, False)]


def test_a_run_that_goes_on_and_saves_no_checkpoint_says_so(tmp_path):
    def notices(name, **more):
        run = kway.train(job(), devices="cpu:1", out=tmp_path / name, **TRAINED, **more)
        return [line for line in run.record.notices if "saves none itself" in line]

    assert notices("first", steps=1, checkpoint_every="1steps") == []
    assert len(notices("silent", steps=2, resume=tmp_path / "first")) == 1
    assert notices("saving", steps=2, resume=tmp_path / "first", checkpoint_every="1steps") == []


def test_how_earlier_runs_went_on_is_nothing_of_a_later_one(ranks, tmp_path):
    heard = []
    tell = lambda event, record: heard.append(record["text"]) if event == "notice" else None  # noqa: E731

    def on(name, steps, **more):
        given = {"devices": "cpu:1", "checkpoint_every": "1steps", "tune": False, **TRAINED, **more}
        return kway.train(job(), out=tmp_path / name, steps=steps, **given).record

    on("first", 1, devices="cpu:2", exactness="bits", ranks=ranks)
    second = on("second", 2, resume=tmp_path / "first", patience=7)
    assert any("resumed from step 1 " in line for line in second.notices)
    assert any(line.startswith("goes on otherwise than up to step 1") for line in second.notices)
    # Whatever goes on, this is true of the training as a whole.
    earlier = "up to step 1 the run was at exactness bits"
    assert earlier in second.notices
    third = on(
        "third", 3, resume=tmp_path / "second", patience=7, devices="cpu:2", ranks=ranks, callbacks=[tell]
    )
    assert any("on 2 devices instead of 1 other masks" in line for line in third.notices)
    fourth = on("fourth", 4, resume=tmp_path / "third", patience=7, callbacks=[tell])
    of_resuming = ("resumed from step", "goes on otherwise", "random numbers of the model")
    for record, step, other in (
        (third, 2, "on 2 devices instead of 1"),
        (fourth, 3, "on 1 device instead of 2"),
    ):
        lines = [line for line in record.notices if line.startswith(of_resuming)]
        assert len(lines) == 2
        assert lines[0].startswith(f"resumed from step {step} ")
        assert other in lines[1]
        assert earlier in record.notices
    assert [line.split()[3] for line in heard if line.startswith("resumed from")] == ["2", "3"]
