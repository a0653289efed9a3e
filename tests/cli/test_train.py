"""``kway train`` from its flags to its files, in this process."""

import errno
import json
import os
import re
import shlex

import pytest
from safetensors.torch import load_file

from kway.checkpoints.saving import write_checkpoint
from kway.cli.main import main
from kway.errors import UsageError

FILE = """
import torch
from torch import nn

X = torch.linspace(-1, 1, 12).unsqueeze(1)


class Line(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def forward(self, x):
        return self.layer(x)


def data():
    return (X, 2 * X), (X[:5], -X[:5])
"""
LINE = [
    "train",
    "line.py:Line",
    "--data",
    "line.py:data",
    "--devices",
    "cpu:1",
    "--batch-size",
    "6",
    "--lr",
    "0.2",
]


@pytest.fixture
def here(tmp_path, monkeypatch):
    (tmp_path / "line.py").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_average_and_early_stop(here, capsys):
    # What is held out says the opposite: the better the line fits, the worse it gets.
    flags = ["--ema", "0.5", "--early-stop", "validation_loss", "--patience", "2", "--epochs", "50"]
    assert main([*LINE, *flags, "--out", "run"]) == 0
    said = capsys.readouterr().out
    record = json.loads((here / "run" / "train.json").read_text())
    assert record["ema"] == 0.5
    assert record["stopped_early"] is True
    assert len(record["epochs"]) < 50
    losses = [row["validation_loss"] for row in record["epochs"]]
    assert losses.index(min(losses)) == len(losses) - 3
    average, weights = (load_file(here / "run" / f"{name}.safetensors") for name in ("ema", "weights"))
    assert average.keys() == weights.keys()
    assert float(average["layer.weight"]) != float(weights["layer.weight"])
    assert "note       stopped early after epoch" in said
    assert "note       validation figures are of the moving average" in said
    assert "weights.safetensors, ema.safetensors" in said


def test_the_screen_says_where_a_run_ends_and_what_it_wrote(here, capsys):
    flags = ["--steps", "3", "--checkpoint-every", "2steps", "--save-best", "validation_loss", "--out", "run"]
    assert main([*LINE, *flags]) == 0
    said = capsys.readouterr().out
    assert "stops after 3 steps, 2 steps over 12 samples an epoch, single on 1 device" in said
    assert "epoch 2/2 (1 of 2 steps)  loss" in said
    wrote = re.search(r"wrote +run/: (.+)", said)
    assert wrote is not None
    names = [path.name + "/" * path.is_dir() for path in (here / "run").iterdir()]
    assert sorted(wrote[1].split(", ")) == sorted(names)


def test_checkpoints_that_a_run_went_on_from_are_none_that_it_wrote(here, capsys):
    assert main([*LINE, "--steps", "2", "--checkpoint-every", "2steps", "--out", "run"]) == 0
    assert "checkpoints/" in capsys.readouterr().out.splitlines()[-1]
    (here / "run" / "train.json").unlink()
    assert main([*LINE, "--steps", "3", "--resume", "--out", "run"]) == 0
    said = capsys.readouterr().out
    assert "note       goes on from a checkpoint and saves none itself, as --checkpoint-every" in said
    assert said.splitlines()[-1].startswith("wrote      run/: train.json")
    assert "checkpoints/" not in said.splitlines()[-1]


@pytest.mark.parametrize("command", ["evaluate", "predict"])
def test_what_is_judged_is_said(here, capsys, command):
    assert main([*LINE, "--epochs", "1", "--out", "run"]) == 0
    capsys.readouterr()
    assert main([command, *LINE[1:6], "--weights", "run"]) == 0
    assert "\non         5 samples held out\n" in capsys.readouterr().out


def test_a_loss_that_was_chosen_is_said_to_be_before_it_fails(here, capsys):
    wide = "\n\ndef wide():\n    return nn.Linear(1, 3)\n"
    (here / "line.py").write_text(FILE + wide)
    assert main(["train", "line.py:wide", *LINE[2:], "--out", "run"]) == 2
    said = capsys.readouterr()
    assert "loss       mse (usual for real targets)\n" in said.out
    assert "3 numbers a sample beside one; for classes" in said.err


def test_a_model_that_fails_on_the_usual_data_is_told_that_no_data_was_named(here, capsys):
    assert main(["train", "line.py:Line", "--devices", "cpu:1", "--out", "run"]) == 1
    said = capsys.readouterr()
    assert "(no --data was given)" in said.out
    assert said.err.count("kway: error: ") == 1
    last = said.err.splitlines()[-1]
    assert last.startswith("kway: error: line.py:Line raised RuntimeError: ")
    assert last.endswith(
        ": no --data was given, so line.py:Line was run on the images of 'synthetic'; for text pass --data text, for "
        "your own --data path/file.py:name"
    )
    # The lines that led there begin with the user's.
    files = re.findall(r'File "(.*)", line', said.err)
    assert files[0] == str(here / "line.py")


def test_a_model_that_fails_on_its_own_data_raises_what_it_raises(here, capsys):
    (here / "line.py").write_text(FILE + "\n\ndef narrow():\n    return X[:, :0], X\n")
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        main(["train", "line.py:Line", "--devices", "cpu:1", "--out", "run", "--data", "line.py:narrow"])
    assert "(no --data was given)" not in capsys.readouterr().out
    assert not hasattr(caught.value, "__notes__")


def test_without_either(here, capsys):
    assert main([*LINE, "--epochs", "2", "--out", "run", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["ema"], record["ema_sha256"], record["stopped_early"]) == (None, None, False)
    assert not (here / "run" / "ema.safetensors").exists()


JOB = (
    FILE
    + """

import kway

job = kway.Job(model=Line, loss=nn.MSELoss(), optimizer=torch.optim.SGD, data=(X, X), batch_size=6, ema=0.25)
"""
)


@pytest.mark.parametrize(("flags", "decay"), [([], 0.25), (["--ema", "0.75"], 0.75)])
def test_a_job_s_own_decay_stands_unless_it_is_given(here, capsys, flags, decay):
    (here / "job.py").write_text(JOB)
    words = ["train", "job.py:job", "--devices", "cpu:1", "--epochs", "1", "--out", "run", "--json"]
    assert main([*words, *flags]) == 0
    assert json.loads(capsys.readouterr().out)["ema"] == decay


STOPPED = (
    FILE
    + """
import os, pathlib, signal


class Stopping(Line):
    def forward(self, x):
        once = pathlib.Path("once")
        if self.training and once.exists():
            once.unlink()
            os.kill(os.getpid(), signal.SIGTERM)
        return super().forward(x)
"""
)


def test_a_run_without_out_that_is_stopped_says_what_makes_it_go_on(here, capsys):
    (here / "stopped.py").write_text(STOPPED)
    (here / "once").touch()
    line = ["train", "stopped.py:Stopping", *LINE[2:], "--steps", "4"]
    assert main(line) == 75
    told = re.search(r"go on with (--resume .+) \(", capsys.readouterr().err)
    assert told is not None
    assert main([*line, *shlex.split(told[1])]) == 0
    (folder,) = (here / "runs").iterdir()
    assert json.loads((folder / "train.json").read_text())["resumed_from_step"] < 4


def test_a_run_begins_with_the_weights_of_the_folder_of_another(here):
    assert main([*LINE, "--steps", "2", "--out", "first"]) == 0
    assert main([*LINE, "--steps", "1", "--lr", "0", "--init", "first", "--out", "second"]) == 0
    first, second = (load_file(here / name / "weights.safetensors") for name in ("first", "second"))
    assert first.keys() == second.keys()
    assert all((first[name] == second[name]).all() for name in first)


def test_timeline(here, capfd):
    assert main([*LINE, "--epochs", "5", "--timeline", "4", "--out", "run"]) == 0
    said = capfd.readouterr()
    assert "timeline   4 steps from 7 to 10" in said.out
    assert re.search(r"^rank +ms a step +compute", said.out, re.MULTILINE)
    assert "timeline.json.gz" in said.out
    assert said.err == ""
    # Without a number 5 are meant, which are too many here.
    assert main([*LINE, "--epochs", "5", "--timeline", "--out", "other"]) == 2
    assert "timeline=5 in a run of 10 steps" in capfd.readouterr().err
    assert not (here / "other").exists()


def test_a_batch_by_device_says_what_scaling_would_be_and_does_it_when_asked(tmp_path, capsys, forks):
    line = ["train", "mlp", "--devices", "cpu:2", "--batch-size-per-device", "8", "--steps", "3", "--no-tune"]
    assert main([*line, "--out", str(tmp_path / "plain")]) == 0
    said = capsys.readouterr().out
    assert "batch      8 a device, fp32" in said
    assert "the global batch is 2 x 8 = 16, and the learning rate stays 0.1" in said
    assert "would be 0.2 (linear) and 0.1414 (sqrt)" in said
    assert json.loads((tmp_path / "plain/train.json").read_text())["batch_size"] == 16
    more = ["--lr-scale", "sqrt", "--lr-warmup", "2steps"]
    assert main([*line, *more, "--out", str(tmp_path / "scaled")]) == 0
    assert (
        "sqrt scaling makes the learning rate 0.1414, after a warm-up of 2 steps" in capsys.readouterr().out
    )
    scale = json.loads((tmp_path / "scaled/train.json").read_text())["lr_scale"]
    assert (scale["rule"], scale["devices"], scale["warmup_steps"]) == ("sqrt", 2, 2)
    assert json.loads((tmp_path / "plain/train.json").read_text())["lr_scale"] is None


def test_where_ranks_meet_is_for_ranks(tmp_path, capsys, monkeypatch):
    """A process that is alone would take no notice; what cannot be right is said first."""
    words = ["train", "lenet", "--out", str(tmp_path / "run"), "--init-method"]
    assert main([*words, "tcp://127.0.0.1:29500"]) == 2
    assert "tcp://127.0.0.1:29500 in a process that is alone" in capsys.readouterr().err
    monkeypatch.setenv("PMI_RANK", "0")
    monkeypatch.setenv("PMI_SIZE", "2")
    assert main([*words, "file://x"]) == 2
    assert "--init-method 'file://x'" in capsys.readouterr().err
    assert "KWAY_INIT_METHOD" not in os.environ
    assert not (tmp_path / "run").exists()


def full(*_, **__):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_costs_the_picture_and_the_last_checkpoint_and_says_so(here, capsys, monkeypatch):
    writes = []

    def write(folder, frozen):
        writes.append(frozen.step)
        if len(writes) == 2:
            full()
        write_checkpoint(folder, frozen)

    def draw(training, path):
        raise UsageError(f"cannot write {path}: No space left on device")

    monkeypatch.setattr("kway.checkpoints.writer.write_checkpoint", write)
    monkeypatch.setattr("kway.report.curves.draw", draw)
    assert main([*LINE, "--epochs", "4", "--checkpoint-every", "2", "--out", "run"]) == 0
    said = capsys.readouterr().out.splitlines()
    for words in (
        "checkpoint of step 8 was not written",
        "the curves were not drawn: cannot write run/curves.png",
    ):
        (line,) = (line for line in said if words in line)
        assert line.startswith("warning ")
    assert said[-1] == "wrote      run/: train.json, weights.safetensors, checkpoints/"
    assert said[-2].startswith("8 steps, ")
    (kept,) = json.loads((here / "run" / "train.json").read_text())["notices"]
    assert kept.startswith("checkpoint of step 8 was not written")


def test_a_warning_that_epochs_came_after_is_said_again_at_the_end(here, capsys, monkeypatch):
    writes = []

    def write(folder, frozen):
        writes.append(frozen.step)
        if len(writes) == 1:
            full()
        write_checkpoint(folder, frozen)

    monkeypatch.setattr("kway.checkpoints.writer.write_checkpoint", write)
    assert main([*LINE, "--epochs", "4", "--checkpoint-every", "1", "--out", "run"]) == 0
    said = [line for line in capsys.readouterr().out.splitlines() if "of step 2 was not written" in line]
    assert [line.split()[0] for line in said] == ["warning", "note"]


def test_ctrl_c_while_the_curves_are_drawn_says_that_all_else_is_there(here, capsys, monkeypatch):
    def interrupted(training, path):
        raise KeyboardInterrupt

    monkeypatch.setattr("kway.report.curves.draw", interrupted)
    assert main([*LINE, "--epochs", "1", "--out", "run"]) == 130
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == "kway: interrupted: the run has ended: run holds train.json, weights.safetensors"


JOBS = """
from functools import partial

import torch
from line import X, Line

import kway


def two_rates(named):
    weight, bias = (parameter for _, parameter in named)
    return torch.optim.AdamW([{"params": [weight]}, {"params": [bias], "lr": 0.5}], lr=0.25)


plain = kway.Job(
    Line, torch.nn.MSELoss(), partial(torch.optim.SGD, lr=0.05, momentum=0.9), (X, 2 * X), (X[:5], X[:5]), batch_size=4
)
made = kway.Job(
    Line,
    lambda output, target: (output - target).abs(),
    two_rates,
    (X, 2 * X),
    batch_size=6,
    seed=3,
    schedule=partial(torch.optim.lr_scheduler.LinearLR, start_factor=0.5),
)
"""


@pytest.mark.parametrize(
    ("name", "flags", "lines"),
    [
        (
            "plain",
            ["--lr", "0.2", "--optimizer", "sgd"],
            [
                "job        jobs.py:plain (optimizer from the command line)",
                "data       float32 12x1, float32 12x1: 12 to train on, 5 held out",
                "loss       MSELoss(reduction=mean)",
                "optimizer  SGD, lr 0.2",
                "batch      4 (global), fp32, seed 0",
            ],
        ),
        (
            "plain",
            ["--batch-size", "6"],
            [
                "job        jobs.py:plain (batch_size from the command line)",
                "data       float32 12x1, float32 12x1: 12 to train on, 5 held out",
                "loss       MSELoss(reduction=mean)",
                "optimizer  SGD, lr 0.05, momentum 0.9",
                "batch      6 (global), fp32, seed 0",
            ],
        ),
        (
            "made",
            [],
            [
                "job        jobs.py:made",
                "data       float32 12x1, float32 12x1: 12 to train on",
                "loss       <lambda>",
                "optimizer  AdamW, lr (0.125, 0.25) at first, betas (0.9, 0.999), weight_decay 0.01",
                "schedule   LinearLR(start_factor=0.5)",
                "batch      6 (global), fp32, seed 3",
            ],
        ),
    ],
)
def test_the_header_of_a_job_says_what_it_is(here, capsys, name, flags, lines):
    (here / "jobs.py").write_text(JOBS)
    assert (
        main(["train", f"jobs.py:{name}", *flags, "--devices", "cpu:1", "--epochs", "1", "--out", "run"]) == 0
    )
    said = capsys.readouterr().out.splitlines()
    assert said[: len(lines) + 1] == [*lines, "devices    1 (single, math)"]
