"""Trackers in real runs: TensorBoard's files, wandb and mlflow by stand-ins, the user's own, and what is refused."""

import importlib
import json
import subprocess
import sys
from functools import partial

import pytest
import torch
from tests.trackers.test_following import Heard
from torch import nn

import kway
from kway.cli.main import main

X, Y = torch.randn(23, 3, generator=torch.Generator().manual_seed(0)), torch.arange(23) % 4


def sgd(named):
    """Two groups: options that they share, and one that differs."""
    parameters = dict(named)
    weights, biases = (
        [value for name, value in parameters.items() if name.endswith(end)] for end in ("weight", "bias")
    )
    return torch.optim.SGD([{"params": weights, "lr": 0.2}, {"params": biases, "lr": 0.1}], momentum=0.9)


def job_of(**more):
    return kway.Job(
        lambda: nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 4)),
        nn.CrossEntropyLoss(),
        **{
            "optimizer": partial(torch.optim.SGD, lr=0.1),
            "data": (X, Y),
            "batch_size": 8,
            "name": "small",
            **more,
        },
        validation=(X, Y),
        metrics={"accuracy": kway.accuracy},
    )


def train(size, job=None, **more):
    more = {"devices": f"cpu:{size}", "echo": False, "epochs": 2, "log_every": 1, "tune": False, **more}
    return kway.train(job or job_of(), **more)


@pytest.mark.parametrize("size", [1, 2])
def test_a_tracker_gets_configuration_and_figures_of_the_run(ranks, size):
    heard = Heard()
    run = train(size, job_of(optimizer=sgd), ranks=ranks, trackers=[heard])
    config = heard.calls[0][1]
    assert (config["model"], config["devices"], config["batch_size"], config["epochs"]) == (
        "small",
        size,
        8,
        2,
    )
    assert (config["optimizer"], config["optimizer_lr"], config["optimizer_momentum"]) == (
        "SGD",
        [0.2, 0.1],
        0.9,
    )
    assert None not in config.values()
    # What goes to three services is plain.
    assert json.loads(json.dumps(config)) == config
    logged = [
        (number, name, value) for _, number, found in heard.calls[1:-1] for name, value in found.items()
    ]
    assert [number for number, name, _ in logged if name == "train/loss"] == [1, 2, 3, 4, 5, 6]
    for at, row in zip((3, 6), run.epochs, strict=True):
        named = {name: value for number, name, value in logged if number == at}
        assert named["epoch/train_loss"] == row["train_loss"]
        assert named["validation/loss"] == row["validation_loss"]
        assert named["validation/accuracy"] == row["accuracy"]
        assert named["epoch/lr"] == row["lr"]
    assert heard.calls[-1] == ("end", "finished")


@pytest.mark.parametrize("size", [1, 2])
def test_a_tracker_that_fails_ends_no_run_and_stands_in_the_record(ranks, size):
    warned = []

    def hear(event, record):
        warned.extend([record["text"]] if event == "warning" else [])

    run = train(size, ranks=ranks, trackers=[Heard("log")], callbacks=[hear])
    assert run.record.steps == 6
    said = [text for text in run.record.notices if "tracker" in text]
    assert said == warned == [
        "tracker heard failed in log at step 1, and hears no more of this run: OSError: no log"
    ]  # fmt: skip
    assert run.record.weights_sha256 == train(size, ranks=ranks).record.weights_sha256


def test_a_run_that_fails_ends_its_trackers_as_failed(ranks):
    def stop(event, record):
        if event == "epoch":
            raise KeyError("enough")

    heard = Heard()
    with pytest.raises(KeyError):
        train(1, trackers=[heard], callbacks=[stop])
    assert heard.calls[-1] == ("end", "failed")


def test_threads_tell_too():
    heard = Heard()
    train(2, strategy="threads", trackers=[heard])
    assert heard.names[0] == "begin"
    assert heard.calls[-1] == ("end", "finished")
    assert len(heard.threads) == 1


def points(folder):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = events.EventAccumulator(str(folder))
    found.Reload()
    return {tag: [(e.step, e.value) for e in found.Scalars(tag)] for tag in found.Tags()["scalars"]}, found


def test_event_files_hold_what_the_record_holds(ranks, tmp_path):
    pytest.importorskip("tensorboard")
    out = tmp_path / "run"
    run = train(2, ranks=ranks, trackers=["tensorboard"], out=out)
    found, all_of = points(out / "tensorboard")
    assert [number for number, _ in found["train/loss"]] == [1, 2, 3, 4, 5, 6]
    assert found["validation/accuracy"] == [
        (at, pytest.approx(row["accuracy"])) for at, row in zip((3, 6), run.epochs, strict=True)
    ]
    texts = {
        tag: all_of.Tensors(tag)[0].tensor_proto.string_val[0].decode() for tag in all_of.Tags()["tensors"]
    }
    assert "| batch_size | 8 |" in texts["config/text_summary"]
    assert texts["status/text_summary"] == "finished"


def test_a_run_that_goes_on_hides_the_points_beyond_its_checkpoint(ranks, tmp_path):
    pytest.importorskip("tensorboard")
    out, given = tmp_path / "run", {"ranks": ranks, "trackers": ["tensorboard"], "checkpoint_every": "4steps"}

    def stop(event, record):
        if event == "step" and record["global_step"] == 6:
            raise KeyError("enough")

    with pytest.raises(KeyError):
        train(1, out=out, callbacks=[stop], **given)
    assert points(out / "tensorboard")[0]["train/loss"][-1][0] == 5
    train(1, out=out, resume=True, **given)
    steps = [number for number, _ in points(out / "tensorboard")[0]["train/loss"]]
    assert steps == [1, 2, 3, 4, 5, 6]


def test_weights_and_biases_is_called_as_it_documents(services):
    run = train(1, trackers=[kway.trackers.wandb(project="shirts", config={"note": "mine"})])
    calls = importlib.import_module("wandb").calls
    name, project, config = calls[0]
    assert (name, project, config["note"], config["model"]) == ("init", "shirts", "mine", "small")
    assert calls[-1] == ("finish", 0)
    logged = {name: value for kind, found, *_ in calls[1:-1] for name, value in found.items()}
    assert logged["validation/accuracy"] == run.epochs[-1]["accuracy"]
    with pytest.raises(kway.NonFiniteError):
        train(1, job_of(optimizer=partial(torch.optim.SGD, lr=float("inf"))), trackers=["wandb"])
    assert calls[-1] == ("finish", 1)


def test_mlflow_is_called_as_it_documents(services):
    metrics = {"top 1 (%)": kway.accuracy}
    job = kway.Job(
        nn.Linear(3, 4), nn.CrossEntropyLoss(), torch.optim.SGD, (X, Y), (X, Y), 8, metrics=metrics
    )
    run = train(2, job, strategy="threads", trackers=[kway.trackers.mlflow(run_name="first")])
    calls = importlib.import_module("mlflow").calls
    assert calls[0][:2] == ("start", "first")
    assert (calls[0][2]["devices"], calls[0][2]["strategy"]) == ("2", "threads=2")
    assert calls[1][1]["batch_size"] == 8
    assert not {"devices", "strategy", "resumed_from_step"} & set(calls[1][1])
    assert calls[-1] == ("end", "FINISHED")
    logged = {name: value for kind, found, step in calls[2:-1] for name, value in found.items()}
    assert logged["validation/top 1 ___"] == run.epochs[-1]["top 1 (%)"]


def test_figures_that_never_reached_the_server_are_told(services):
    importlib.import_module("mlflow").FAILS.append("no route to host")
    run = train(1, trackers=["mlflow"])
    assert run.record.notices[-1] == (
        "tracker mlflow failed in end, and hears no more of this run: ConnectionError: no route to host"
    )
    assert importlib.import_module("mlflow").calls[-1] == ("end", "FINISHED")


def test_mlflow_s_run_is_ended_where_its_configuration_is_refused(services):
    fake = importlib.import_module("mlflow")
    fake.REFUSES.append("no route to host")
    run = train(1, trackers=["mlflow"])
    assert [call[0] for call in fake.calls] == ["start", "end"]
    assert fake.calls[-1] == ("end", "FAILED")
    assert run.record.notices[-1] == (
        "tracker mlflow failed in begin, and hears no more of this run: ConnectionError: no route to host"
    )


def test_a_run_of_mlflow_that_is_somebody_else_s_is_not_ended(services, monkeypatch):
    fake = importlib.import_module("mlflow")
    monkeypatch.setattr(fake, "start_run", lambda **_: (_ for _ in ()).throw(OSError("already active")))
    ended = []
    monkeypatch.setattr(fake, "end_run", lambda **given: ended.append(given))
    train(1, trackers=["mlflow"])
    assert ended == []


def test_a_run_of_mlflow_takes_its_resumption_elsewhere(services, ranks, tmp_path):
    fake = importlib.import_module("mlflow")
    train(1, trackers=["mlflow"], epochs=1, ranks=ranks, out=tmp_path / "run", checkpoint_every=1)
    own = {"devices": "two", "note": "mine"}
    trackers = [kway.trackers.mlflow(run_id="r1", tags=own)]
    run = train(2, trackers=trackers, ranks=ranks, resume=tmp_path / "run")
    assert not [text for text in run.record.notices if "tracker" in text]
    first, second = (call[2] for call in fake.calls if call[0] == "start")
    assert "resumed_from_step" not in first
    assert (second["resumed_from_step"], first["strategy"], second["strategy"]) == ("3", "single", "data=2")
    assert (first["devices"], second["devices"], second["note"]) == ("1", "two", "mine")
    assert fake.calls[-1] == ("end", "FINISHED")


def test_event_files_are_closed_where_they_could_not_be_begun(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    writers = importlib.import_module("torch.utils.tensorboard.writer")
    closed = []

    class Full(writers.SummaryWriter):
        def add_text(self, *_):
            raise OSError("no space left")

        def close(self):
            closed.append(self)
            super().close()

    monkeypatch.setattr(writers, "SummaryWriter", Full)
    run = train(1, trackers=["tensorboard"], out=tmp_path / "run")
    assert len(closed) == 1
    assert run.record.notices[-1] == (
        "tracker eventfiles failed in begin, and hears no more of this run: OSError: no space left"
    )
    tracker = kway.trackers.tensorboard(tmp_path)
    tracker.end("failed")  # nothing was opened


@pytest.mark.parametrize(
    ("trackers", "words"),
    [
        ("tensorboard", "trackers='tensorboard': it must be a list"),
        (3, "trackers=3: it must be a list"),
        (["tensorbord"], "unknown tracker 'tensorbord'.*did you mean 'tensorboard'"),
        (["tensorboard"], "tracker tensorboard without out"),
        ([Heard], r"trackers\[0\] is the class Heard.*pass an object"),
        ([print], r"trackers\[0\] is of type builtin.*it lacks begin, log, end"),
        (["wandb"], "the package wandb is not installed here; pip install wandb"),
        ([Heard()] * 2, r"trackers\[1\] is there twice"),
    ],
)
def test_what_is_no_tracker_is_refused_before_anything_starts(trackers, words):
    begun = []
    with pytest.raises(kway.UsageError, match=words):
        train(1, trackers=trackers, callbacks=[lambda event, _: begun.append(event)])
    assert begun == []


def test_a_refused_tracker_leaves_no_folder(tmp_path):
    with pytest.raises(kway.UsageError, match="unknown tracker"):
        train(1, trackers=["board"], out=tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_another_run_s_event_files_is_refused(tmp_path):
    (tmp_path / "tensorboard").mkdir()
    with pytest.raises(kway.UsageError, match="already holds tensorboard"):
        train(1, out=tmp_path)


def test_the_command_takes_trackers_by_name(tmp_path, monkeypatch, capsys, services):
    pytest.importorskip("tensorboard")
    monkeypatch.chdir(tmp_path)
    words = "train mlp --data synthetic --devices cpu:1 --steps 2 --out run --tracker tensorboard,wandb"
    assert main(words.split()) == 0
    assert "tensorboard/" in capsys.readouterr().out
    assert list((tmp_path / "run/tensorboard").iterdir())
    assert importlib.import_module("wandb").calls[-1] == ("finish", 0)
    assert main([*words.split()[:-1], "board", "--out", "other"]) == 2
    assert "unknown tracker 'board'" in capsys.readouterr().err


def test_naming_trackers_imports_none_of_their_packages():
    code = "import sys, kway; kway.trackers.tensorboard('x'); sys.exit(bool({'torch', 'tensorboard'} & {*sys.modules}))"
    pytest.importorskip("tensorboard")
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
