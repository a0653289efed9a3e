"""``kway profile``: one real run in small, what it prints and leaves, and what is refused."""

import json
import shlex

import pytest
from matplotlib.image import imread

from kway.cli.main import main
from kway.workload import Workload

WORDS = [
    "profile",
    "mlp",
    "--data",
    "synthetic",
    "--batch-size",
    "32",
    "--devices",
    "cpu:2",
    "--seconds",
    "0.1",
]


def test_a_run_is_recorded_drawn_and_printed(tmp_path, capsys):
    out = tmp_path / "out"
    assert main([*WORDS, "--out", str(out)]) == 0
    text = capsys.readouterr().out
    assert "bound by" in text
    assert "gradients  " in text
    assert f"wrote      {out}/: workload.json, workload.png" in text
    plan = f"next       kway plan mlp --workload {out}/workload.json --data synthetic --batch-size 32"
    assert text.splitlines()[-1] == f"{plan} --devices 'cpu:1 cpu:2'"
    record = Workload.load(out)
    assert (record.model, record.batch_size, record.device) == ("mlp", 32, "cpu")
    assert {timing["devices"] for timing in record.timings} == {1, 2}
    assert imread(out / "workload.png").shape[1] >= 800
    # A folder that holds a profile is not written over.
    assert main([*WORDS, "--out", str(out)]) == 2


def test_the_next_command_plans_by_the_profile_and_takes_none_anew(tmp_path, capsys):
    words = [*WORDS, "--step-kind", "eager", "--shards", "4", "--exactness", "bits", "--lr", "0.2"]
    words[words.index("cpu:2")] = "cpu:1"
    assert main([*words, "--out", str(tmp_path / "out")]) == 0
    following = shlex.split(capsys.readouterr().out.splitlines()[-1])
    assert following[:4] == ["next", "kway", "plan", "mlp"]
    assert main([*following[2:], "--out", str(tmp_path / "plan")]) == 0
    text = capsys.readouterr().out
    assert "profiling" not in text
    assert "1*  single" in text


def test_json_is_the_record_and_nothing_else(tmp_path, capsys):
    assert main([*WORDS, "--json", "--out", str(tmp_path / "out")]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown == json.loads((tmp_path / "out/workload.json").read_text())


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--seconds", "-1"], "seconds=-1"),
        (["--step-kind", "graph"], "CUDA"),
        (["--exactness", "most"], "exactness level"),
        (["--devices", "tpu"], "tpu"),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(tmp_path, capsys, more, said):
    assert main([*WORDS, *more, "--out", str(tmp_path / "out")]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
