"""``kway.train`` from the outside: one device and several, events, files, and what stays untouched."""

import json
import random
from functools import partial

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, Dataset

import kway
from kway.training.weights import fingerprint, unique_names

G = torch.Generator().manual_seed(0)
X, Y = torch.randn(23, 3, generator=G), torch.arange(23) % 4
HELD = torch.randn(7, 3, generator=G), torch.arange(7) % 4
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def net():
    return nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 4))


def job_of(**more):
    more = {"model": net, "loss": nn.CrossEntropyLoss(), "optimizer": SGD, "batch_size": 8, **more}
    more = {"data": (X, Y), "validation": HELD, "metrics": {"accuracy": kway.accuracy}, **more}
    return kway.Job(**more)


def train(ranks, job, size, **more):
    return kway.train(job, devices=f"cpu:{size}", ranks=ranks, echo=False, **{"epochs": 2, **more})


def figures(run):
    names = ("train_loss", "train_accuracy", "validation_loss", "accuracy")
    return [row[name] for row in run.epochs for name in names]


def test_one_two_and_three_devices_report_the_same_numbers(ranks):
    alone = train(ranks, job_of(precision="fp64"), 1)
    assert [row["steps"] for row in alone.epochs] == [3, 3]
    assert [row["samples"] for row in alone.epochs] == [23, 23]
    for size in (2, 3):
        run = train(ranks, job_of(precision="fp64"), size)
        assert figures(run) == pytest.approx(figures(alone), rel=0, abs=1e-12)
        assert run.record.layout == {"data": size}
        assert len(run.record.peak_memory_bytes) == size
        for name, value in alone.model.state_dict().items():
            torch.testing.assert_close(run.model.state_dict()[name], value, rtol=0, atol=1e-12)
    assert alone.epochs[1]["train_loss"] < alone.epochs[0]["train_loss"]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_run_can_be_repeated_to_the_bit(ranks, size):
    first, second = (train(ranks, job_of(), size) for _ in range(2))
    assert first.record.weights_sha256 == second.record.weights_sha256
    assert figures(first) == figures(second)
    assert train(ranks, job_of(seed=1), size).record.weights_sha256 != first.record.weights_sha256
    assert fingerprint(first.model.state_dict(), unique_names(first.model)) == first.record.weights_sha256


@pytest.mark.parametrize("size", [1, 2])
def test_an_instance_holds_the_trained_weights(ranks, size):
    model = net()
    start = {name: value.clone() for name, value in model.state_dict().items()}
    run = train(ranks, job_of(model=model), size)
    assert run.model is model
    assert not torch.equal(model[0].weight, start["0.weight"])
    assert fingerprint(model.state_dict(), unique_names(model)) == run.record.weights_sha256
    odd = {"w": torch.ones(4, dtype=torch.float64)[::4]}
    assert fingerprint(odd, ["w"]) == fingerprint({"w": torch.ones(1, dtype=torch.float64)}, ["w"])
    assert not any("forward" in vars(module) for module in model.modules())
    assert int(model[1].num_batches_tracked) == 6


@pytest.mark.parametrize("size", [1, 2])
def test_callbacks_hear_everything_in_the_caller_s_process(ranks, size):
    heard = []
    train(
        ranks, job_of(), size, callbacks=[lambda event, record: heard.append((event, record))], log_every=2,
        validate_every="2steps",
    )  # fmt: skip
    assert [event for event, _ in heard] == [
        "start", "step", "validation", "epoch", "step", "validation", "step", "validation", "epoch", "end",
    ]  # fmt: skip
    records = dict(heard)
    assert heard[0][1]["steps_per_epoch"] == 3
    assert [(r["epoch"], r["step"]) for event, r in heard if event == "step"] == [(1, 2), (2, 1), (2, 3)]
    assert [r["step"] for event, r in heard if event == "validation"] == [2, 4, 6]
    assert records["step"]["loss"] > 0
    assert records["epoch"]["epoch"] == 2


@pytest.mark.parametrize("size", [1, 2])
def test_an_error_in_a_callback_ends_the_run(ranks, size):
    def stop(event, record):
        if event == "epoch":
            raise KeyError("enough")

    with pytest.raises(KeyError, match="enough"):
        train(ranks, job_of(), size, callbacks=[stop], epochs=1000, tune=False)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(("steps", "rows"), [(1, [1]), (3, [3]), (4, [3, 1]), (100, [3, 3])])
def test_steps_end_a_run(ranks, size, steps, rows):
    run = train(ranks, job_of(), size, steps=steps)
    assert run.record.steps == sum(rows)
    assert [row["steps"] for row in run.epochs] == rows
    assert [row["samples"] for row in run.epochs] == [{3: 23, 1: 8}[n] for n in rows]
    assert "validation_loss" in run.epochs[-1]


@pytest.mark.parametrize("size", [1, 2])
def test_what_a_folder_holds(ranks, drawn, tmp_path, size):
    out = tmp_path / "deep" / "run"
    run = train(ranks, job_of(name="small"), size, out=out, save_best="accuracy")
    names = {"train.json", "curves.png", "weights.safetensors", "best.safetensors"}
    assert {path.name for path in out.iterdir()} - {"logs"} == names
    record = json.loads((out / "train.json").read_text())
    assert record["model"] == "small"
    assert record["epochs"] == run.epochs
    assert record["weights_sha256"] == run.record.weights_sha256
    assert (record["devices"], record["exactness"], record["step_kind"]) == (size, "math", "eager")
    for name, value in load_file(out / "weights.safetensors").items():
        assert torch.equal(value, run.model.state_dict()[name])
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")
    best = max(run.epochs, key=lambda row: row["accuracy"])
    assert record["best"]["value"] == best["accuracy"]
    before = {path: path.read_bytes() for path in out.iterdir() if path.is_file()}
    with pytest.raises(
        kway.UsageError, match=r"already holds train\.json: .*; name another folder with out= \(--out\)"
    ):
        train(ranks, job_of(), size, out=out)
    assert {path: path.read_bytes() for path in out.iterdir() if path.is_file()} == before


def test_the_best_weights_are_those_that_were_judged(ranks, tmp_path):
    run = train(ranks, job_of(), 2, epochs=4, out=tmp_path / "run", save_best="validation_loss")
    losses = [row["validation_loss"] for row in run.epochs]
    assert run.record.best == {
        "metric": "validation_loss", "value": min(losses), "epoch": losses.index(min(losses)) + 1,
        "step": 3 * (losses.index(min(losses)) + 1),
    }  # fmt: skip
    found = kway.evaluate(job_of(), tmp_path / "run" / "best.safetensors", devices="cpu:1")
    assert found["loss"] == pytest.approx(min(losses), rel=1e-5)


@pytest.mark.parametrize("size", [1, 2])
def test_the_caller_s_random_state_and_threads_stay(ranks, size):
    torch.manual_seed(3)
    np.random.seed(3)
    random.seed(3)
    threads = torch.get_num_threads()
    state = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    train(ranks, job_of(model=lambda: nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5))), size)
    assert torch.equal(torch.get_rng_state(), state[0])
    assert np.random.get_state()[1].tolist() == state[1]
    assert random.getstate() == state[2]
    assert torch.get_num_threads() == threads


class Rows(Dataset):
    def __len__(self):
        return 23

    def __getitem__(self, index):
        return X[index] + 0.1 * torch.randn(3), int(Y[index])


def test_a_loader_with_workers_gives_what_one_without_gives(ranks):
    hashes = set()
    for workers in (0, 2):
        loader = DataLoader(Rows(), batch_size=8, shuffle=True, num_workers=workers)
        job = job_of(data=loader, batch_size=None, precision="fp64")
        runs = [train(ranks, job, size) for size in (1, 2)]
        assert figures(runs[0]) == pytest.approx(figures(runs[1]), abs=1e-12)
        hashes.add(tuple(run.record.weights_sha256 for run in runs))
        assert runs[0].record.batch_size == 8
    assert len(hashes) == 1


class Broken(Dataset):
    """One sample is no number."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.full((3,), float("nan") if index == 6 else 1.0), 0


@pytest.mark.parametrize(("size", "rank"), [(1, 0), (2, 1)])
def test_a_loss_that_is_no_number_names_epoch_step_and_rank(ranks, tmp_path, size, rank):
    job = job_of(model=nn.Linear(3, 4), data=Broken(), batch_size=4, shuffle=False, validation=None)
    with pytest.raises(kway.NonFiniteError, match=rf"nan at epoch 1, step 2: rank {rank}"):
        train(ranks, job, size, out=tmp_path / "run")
    assert not (tmp_path / "run" / "weights.safetensors").exists()
    assert not (tmp_path / "run" / "train.json").exists()


class Learned(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, output, target):
        return self.scale * output.sum(1)


def broken():
    raise RuntimeError("no such layer")


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(
    ("options", "job", "said"),
    [
        ({"strategy": "dat"}, {}, "data"),
        ({"strategy": "data=3"}, {}, "it needs 3"),
        ({"exactness": "close"}, {}, "math"),
        ({"epochs": 0}, {}, "epochs=0"),
        ({"steps": -1}, {}, "steps=-1"),
        ({"validate_every": "2days"}, {}, "validate_every='2days'"),
        ({"save_best": "accurac"}, {}, "accuracy"),
        ({"save_best": "accuracy"}, {"validation": None}, "without validation data"),
        ({}, {"micro_batch": 1}, "micro_batch=1 with batch normalisation"),
        ({}, {"model": nn.DataParallel(nn.Linear(3, 4))}, "DataParallel"),
        ({}, {"model": broken}, "no such layer"),
        ({}, {"model": nn.Flatten()}, "no parameters"),
        ({}, {"data": torch.zeros(0, 3)}, "empty"),
        ({}, {"init": "missing.safetensors"}, r"missing\.safetensors"),
        ({}, {"loss": Learned()}, "trainable parameters"),
        ({"callbacks": 3}, {}, "callbacks is of type int"),
        ({"callbacks": [None]}, {}, r"callbacks\[0\] is of type NoneType"),
        ({"strategy": 3}, {}, "unknown strategy '3'"),
        ({"save_best": 3}, {}, "unknown validation figure '3'"),
        ({"resume": "a\0b"}, {}, r"resume='a\\x00b': no path holds a null"),
    ],
)
def test_bad_input_is_one_error_before_anything_is_written(ranks, tmp_path, size, options, job, said):
    if size == 1 and "micro_batch" in job:
        job = {"micro_batch": 1}
    with pytest.raises(kway.UsageError, match=said):
        train(ranks, job_of(**job), size, out=tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("act", [kway.train, kway.prove])
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"out": "a\0b"}, r"out='a\\x00b': no path holds a null"),
        ({"out": 3}, "out=3: it must be a path"),
        ({"out": b"zz"}, "out=b'zz': it must be a path"),
        ({"strategy": 3}, "unknown strategy '3'"),
        ({"ranks": 3}, "ranks is of type int"),
        ({"job": 3}, "a int in place of a job"),
        ({"job": net}, "a function in place of a job"),
    ],
)
def test_arguments_of_the_wrong_kind(act, options, said):
    with pytest.raises(kway.UsageError, match=said):
        act(**{"job": job_of(), "devices": "cpu:2", **options})


def test_devices_and_strategy_must_agree():
    with pytest.raises(kway.UsageError, match="it needs 1"):
        kway.train(job_of(), devices="cpu:2", strategy="single")
    with pytest.raises(kway.UsageError, match="cpu:0"):
        kway.train(job_of(), devices="cpu:0")


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(kway.UsageError, match="cannot be written"):
        kway.train(job_of(), devices="cpu:1", out=tmp_path / "file" / "run")
    assert (tmp_path / "file").read_text() == "in the way"


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"batch_size": 0}, "batch_size=0"),
        ({"batch_size": -3}, "batch_size=-3"),
        ({"batch_size": 2.5}, "whole number"),
        ({"precision": "fp8"}, "kway refuses it: with two or three bits"),
        ({"micro_batch": 0}, "micro_batch=0"),
        ({"clip": -1}, "greater than 0"),
        ({"clip": ("most", 1.0)}, "norm"),
        ({"seed": "a"}, "seed='a'"),
        ({"optimizer": torch.optim.SGD(net().parameters(), lr=0.1)}, "callable"),
        ({"loss": 5}, "callable"),
    ],
)
def test_a_job_that_cannot_work_is_refused_when_it_is_made(more, said):
    with pytest.raises(kway.UsageError, match=said):
        job_of(**more)


@pytest.mark.parametrize("size", [1, 2])
def test_the_record_says_what_was_trained_and_where(ranks, tmp_path, size):
    schedule = partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)
    model = net()
    model[0].weight.requires_grad_(False)
    train(ranks, job_of(model=model, clip=2.0, schedule=schedule), size, out=tmp_path / "run", epochs=1)
    record = json.loads((tmp_path / "run" / "train.json").read_text())
    job, machine = record["job"], record["machine"]
    optimizer = job.pop("optimizer")
    assert optimizer["name"] == "SGD"
    assert optimizer["groups"][0]["momentum"] == 0.9
    assert optimizer["groups"][0]["nesterov"] is False  # torch's default
    assert optimizer["groups"][0]["lr"] == 0.1  # as it began, not as the schedule left it
    assert job.pop("loss").startswith("CrossEntropyLoss(")
    assert job == {
        "data": "float32 23x3, int64 23",
        "samples": 23,
        "held_out": 7,
        "penalty": None,
        "schedule": "StepLR(step_size=1, gamma=0.5)",
        "clip": "norm 2",
        "shuffle": True,
        "micro_batch": None,
        "workers": 0,
        "init": None,
        "parameters": 3 * 6 + 6 + 2 * 6 + 6 * 4 + 4,
        "trainable": 6 + 2 * 6 + 6 * 4 + 4,
    }
    assert machine["cpu"]
    assert (machine["gpus"], machine["threads"] >= 1, machine["usable"] >= 1) == ([], True, True)


@pytest.mark.parametrize(("size", "place"), [(1, "single on 1 device"), (2, "data=2 on 2 devices")])
def test_a_run_is_told_in_one_line(ranks, size, place):
    run = train(ranks, job_of(), size)
    row = run.epochs[-1]
    figures = f"loss {row['train_loss']:.4f}  validation loss {row['validation_loss']:.4f}"
    assert str(run) == f"Run(net: {place}, 6 steps; epoch 2: {figures}  accuracy {row['accuracy']:.4f})"
    assert repr(train(ranks, job_of(metrics={}, validation=None), size)).count("\n") == 0


def scalar(output, target):
    return nn.functional.cross_entropy(output, target, reduction="none").mean().reshape(())


@pytest.mark.parametrize("size", [1, 2])
def test_a_loss_that_returns_a_scalar_is_warned_about_once(ranks, capsys, size):
    run = kway.train(job_of(loss=scalar), devices=f"cpu:{size}", ranks=ranks, epochs=2)
    said = capsys.readouterr().err
    assert said.count("kway: warning: the loss returned a scalar") == 1
    assert "losses.py" not in said
    assert "rank 1" not in said
    assert sum("the loss returned a scalar" in line for line in run.record.notices) == 1
    plain = kway.train(job_of(), devices=f"cpu:{size}", ranks=ranks, epochs=1)
    assert "warning" not in capsys.readouterr().err
    assert not any("scalar" in line for line in plain.record.notices)


def test_evaluation_warns_about_a_scalar_too(capsys):
    kway.evaluate(job_of(loss=scalar), devices="cpu:1")
    assert capsys.readouterr().err.count("kway: warning: the loss returned a scalar") == 1


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(
    ("steps", "data", "said", "before"),
    [
        (7, (X, Y), "steps=7 (--steps) will not be reached: 2 epochs of 3 steps end the run after 6;", True),
        (6, (X, Y), None, False),
        (5, (X, Y), None, False),
        # How many a sampler gives in its next epoch nobody knows before.
        (7, "sampler", "steps=7 (--steps) was not reached: 2 epochs ended the run after 6;", False),
    ],
)  # fmt: skip
def test_steps_that_the_epochs_do_not_have_are_said(ranks, size, steps, data, said, before):
    heard = []
    if data == "sampler":
        held = torch.utils.data.TensorDataset(X, Y)
        data = DataLoader(held, batch_sampler=[range(8), range(8, 16), range(16, 23)])
    given = {"batch_size": None} if isinstance(data, DataLoader) else {}
    job = job_of(data=data, validation=None, metrics={}, **given)
    tell = lambda event, record: heard.append(record.get("text") if event == "notice" else event)  # noqa: E731
    run = train(ranks, job, size, steps=steps, callbacks=[tell], log_every=1)
    assert run.record.steps == min(steps, 6)
    lines = [line for line in run.record.notices if line.startswith("steps=")]
    assert len(lines) == (said is not None)
    assert said is None or lines[0].startswith(said)
    assert (lines[0] in heard[: heard.index("step")] if lines else False) == before
