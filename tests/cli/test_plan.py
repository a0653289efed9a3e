"""``kway plan``, and ``kway train --plan``, as commands."""

import argparse
import json
from pathlib import Path

import pytest
from tests.planning.machine import measurements
from tests.workloads import workload

from kway.cli import plan
from kway.cli.main import main
from kway.devices.simulated import simulated
from kway.jobs import checking

MODEL = """
import kway, torch
from functools import partial
from torch import nn

x = torch.randn(64, 36, generator=torch.Generator().manual_seed(0))
job = kway.Job(
    model=lambda: nn.Linear(36, 3), loss=nn.CrossEntropyLoss(), optimizer=partial(torch.optim.SGD, lr=0.1),
    data=(x, torch.arange(64) % 3), batch_size=16, name="small")
"""


@pytest.fixture
def words(monkeypatch, tmp_path):
    """A job of the user's, a machine of two cores, and what plans rest on, as files."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for place in ("asked", "elsewhere"):
        monkeypatch.setattr(f"kway.jobs.{place}.discover", lambda: simulated(cores=2))
    monkeypatch.setattr(checking, "RUN_S", 0.0)
    monkeypatch.setattr(checking, "LEAST_WINDOWS", 1)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.py").write_text(MODEL)
    workload((4, 8, 16), model="small", threads=(1, 2)).save(tmp_path)
    measurements(latency_s=1.0).save(tmp_path)
    return [
        "small.py:job", "--workload", "workload.json", "--measurements", "measurements.json", "--strategy",
        "single,data",
    ]  # fmt: skip


def test_a_plan_is_printed_drawn_and_gone_by(words, capsys, tmp_path):
    assert main(["plan", *words, "--out", "plan"]) == 0
    text = capsys.readouterr().out
    assert "1*  single    cpu:1    eager" in text
    assert "  2  data=2 on cpu:2: " in text
    assert "times slower than one device (cpu:1): " in text
    assert "next       kway train small.py:job --plan plan/plan.json" in text
    assert {path.name for path in (tmp_path / "plan").iterdir()} == {"plan.json", "terms.png", "speedup.png"}

    assert main(["train", "small.py:job", "--plan", "plan/plan.json", "--epochs", "12", "--out", "run"]) == 0
    text = capsys.readouterr().out
    assert "as planned on " in text
    assert "predicted  2.6 ms a step, measured " in text
    record = json.loads((tmp_path / "run" / "train.json").read_text())
    assert (record["strategy"], record["predicted_step_s"]) == ("single", pytest.approx(2.6e-3))


@pytest.mark.parametrize("others", ["", "1.8 of 2 processors"])
def test_a_plan_that_cannot_be_is_made_anew_and_not_gone_by(words, capsys, tmp_path, monkeypatch, others):
    """One device of a busy moment: two would be far more than twice as fast."""
    monkeypatch.setattr("kway.devices.busy.taken", lambda usable: others)
    slow = workload((4, 8, 16), model="small", threads=(2,), per_sample_s=1e-2)
    fast = workload((4, 8, 16), model="small", threads=(1,), devices=2)
    both = {"timings": [*slow.timings, *fast.timings], "fits": [*slow.fits, *fast.fits]}
    workload((4, 8, 16), model="small", **both).save(tmp_path)
    measurements(latency_s=1e-6).save(tmp_path)
    assert main(["plan", *words, "--out", "plan", "--batch-size", "16", "--devices", "1,2"]) == 0
    text = capsys.readouterr().out
    assert "which by what is known 2 devices cannot be" in text
    (line,) = [line for line in text.splitlines() if line.startswith("next ")]
    again = "kway plan small.py:job --batch-size 16 --devices 1,2 --strategy single,data"
    # The folder that was named holds this plan now.
    wait = f"wait until other programs are done (they keep {others} busy), then " if others else ""
    assert line == f"next       {wait}{again} --measurements measurements.json --refresh"
    (chosen,) = [line for line in text.splitlines() if line.startswith("chosen ")]
    assert chosen.startswith("chosen     data=2 on cpu:2: ")
    assert chosen.endswith(" a step of 16 samples (doubtful: see the note)")


def test_a_plan_whose_prediction_cannot_be_is_gone_by_once_it_is_checked(
    words, capsys, tmp_path, monkeypatch
):
    """What was measured decides, and needs nothing found out anew."""
    monkeypatch.setattr("kway.devices.busy.taken", lambda usable: "")

    def took(job, row, *rest, **options):
        return 1e-3 * row["devices"]

    monkeypatch.setattr(checking, "measured", took)
    slow = workload((4, 8, 16), model="small", threads=(2,), per_sample_s=1e-2)
    fast = workload((4, 8, 16), model="small", threads=(1,), devices=2)
    both = {"timings": [*slow.timings, *fast.timings], "fits": [*slow.fits, *fast.fits]}
    workload((4, 8, 16), model="small", **both).save(tmp_path)
    measurements(latency_s=1e-6).save(tmp_path)
    assert main(["plan", *words, "--out", "plan", "--check"]) == 0
    text = capsys.readouterr().out
    assert "which by what is known 2 devices cannot be" in text
    assert "doubtful" not in text
    assert "chosen     one device (cpu:1): 1 ms a step of 16 samples, measured (predicted: " in text
    assert text.splitlines()[-1] == "next       kway train small.py:job --plan plan/plan.json"
    record = json.loads((tmp_path / "plan" / "plan.json").read_text())
    assert record["candidates"][record["chosen"]]["strategy"] == "single"
    assert main(["train", "small.py:job", "--plan", "plan/plan.json", "--epochs", "1", "--out", "run"]) == 0
    assert json.loads((tmp_path / "run" / "train.json").read_text())["strategy"] == "single"


def test_json_alone_goes_to_standard_output(words, capsys):
    assert main(["plan", *words, "--out", "plan", "--json", "--devices", "cpu", "--check"]) == 0
    captured = capsys.readouterr()
    record = json.loads(captured.out)
    assert (record["kind"], record["check"]["candidates"]) == ("plan", 1)
    assert "checking 1 candidate" in captured.err


def test_a_machine_that_is_not_here_gives_an_estimate(words, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("kway.jobs.elsewhere.measure", lambda **options: here())
    asked = ["plan", "small.py:job", "--workload", "workload.json", "--on", "8xh100", "--out", "there"]
    assert main([*asked, "--devices", "1,2,8"]) == 0
    text = capsys.readouterr().out
    assert "estimate   this machine is not here" in text
    assert "next " not in text
    record = json.loads((tmp_path / "there" / "plan.json").read_text())
    assert record["estimate_only"]
    assert sorted({row["devices"] for row in record["candidates"]}) == [1, 2, 8]
    assert record["machine"]["gpus"] == ["NVIDIA H100 80GB HBM3"]
    assert record["history"]["checks"] == 0
    assert main([*asked, "--check"]) == 2
    assert main(["train", "small.py:job", "--plan", "there/plan.json"]) == 2
    assert "a plan for a machine that is not here" in capsys.readouterr().err


def test_a_plan_for_another_machine_is_doubted_too(words, capsys, tmp_path, monkeypatch):
    """The whole batch was timed at a busy moment, and shares of it were not."""
    monkeypatch.setattr("kway.jobs.elsewhere.measure", lambda **options: here())
    timed = workload((4, 8, 16), model="small", threads=(2,))
    timings = [
        {**each, "seconds": each["seconds"] * (20 if each["samples"] == 16 else 1)} for each in timed.timings
    ]
    workload((4, 8, 16), model="small", threads=(2,), timings=timings).save(tmp_path)
    asked = ["plan", "small.py:job", "--workload", "workload.json", "--on", "8xh100", "--devices", "1,2"]
    assert main([*asked, "--out", "there"]) == 0
    text = capsys.readouterr().out
    (chosen,) = [line for line in text.splitlines() if line.startswith("chosen ")]
    assert chosen.endswith("(doubtful: see the note)")
    (note,) = [line for line in text.splitlines() if "2 devices cannot be" in line]
    assert note.startswith("note       data=2 on cuda:0,1 would be ")
    assert note.endswith("(profile it anew: kway profile)")


def here():
    """Return what scales a workload from a CPU: rates of products, memory and launches."""
    from tests.measured import entry
    from tests.planning.machine import figure

    found = measurements()
    figures = [
        figure("compute", "matrix product", {"device": "cpu", "dtype": "fp32", "n": 512}, "FLOP/s", 1e11),
        figure("compute", "memory bandwidth", {"device": "cpu"}, "B/s", 2e10),
        figure("compute", "launch", {"device": "cpu", "until": "done"}, "s", 2e-6),
    ]
    return type(found)(
        **{
            **{
                name: getattr(found, name)
                for name in ("versions", "devices", "quick", "made", "age_s", "seconds")
            },
            "machine": {"cpu": "a CPU"},
            "experiments": [*found.experiments, entry("compute")],
            "figures": [*found.figures, *figures],
        }
    )


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("--batch-size 8 --batch-size-per-device 8", "only one of them"),
        ("--devices cpu:0", "at least 1 is needed"),
        ("--on 9xh100", "unknown"),
        ("--on 8xh100 --devices 9", "1 to 8"),
        ("--on 8xh100 --measurements measurements.json", "measurements of a machine that is not here"),
        ("--workload measurements.json", "a record of kind 'measurements'"),
    ],
)
@pytest.mark.usefixtures("words")
def test_bad_input_is_one_line_and_writes_nothing(capsys, tmp_path, asked, said):
    assert main(["plan", "small.py:job", "--out", "plan", *asked.split()]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert not (tmp_path / "plan").exists()


@pytest.mark.usefixtures("words")
@pytest.mark.parametrize("how", [["--strategy", "auto"], ["--plan", "plan.json"]])
def test_a_batch_for_each_device_is_not_chosen_by_a_plan(capsys, how):
    assert main(["train", "small.py:job", "--batch-size-per-device", "8", *how]) == 2
    assert "kway plan --batch-size-per-device N" in capsys.readouterr().err


def test_the_next_command_says_again_what_a_plan_does_not_hold():
    parser = argparse.ArgumentParser()
    plan.configure(parser)
    given = "my.py:Net --data my.py:data --optimizer momentum --lr 0.05 --batch-size 64 --devices 1,2"
    args = parser.parse_args(given.split())
    said = plan._next(args, Path("p"), "math", 64)
    assert said == (
        "kway train my.py:Net --plan p/plan.json --data my.py:data --optimizer momentum --lr 0.05 --batch-size 64"
    )
    assert plan._next(args, Path("p"), "loose", 64) == f"{said} --exactness loose"


@pytest.mark.parametrize(("given", "batch"), [("--batch-size 8", 8), ("--batch-size-per-device 8", 16)])
def test_the_next_command_trains_a_job_with_the_batch_that_was_planned(words, capsys, given, batch):
    """The job has one of its own, which the plan is not of."""
    devices = "cpu:2" if "per" in given else "cpu:1"
    workload((4, 8, 16), model="small", threads=(1, 2), batch_size=batch).save(Path())
    asked = [*words[:5], *given.split(), "--devices", devices, "--out", "plan"]
    assert main(["plan", *asked]) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    assert line == f"next       kway train small.py:job --plan plan/plan.json --batch-size {batch}"
    if devices == "cpu:1":
        assert main([*line.split()[2:], "--epochs", "1", "--out", "run"]) == 0
