"""``kway prove`` on a Job of the user's own."""

import dataclasses
import json

import pytest

from kway.cli.main import main

SOURCE = """
import kway, torch

x = torch.randn(8, 3)
job = kway.Job(torch.nn.Linear(3, 1), torch.nn.MSELoss(), torch.optim.AdamW, data=(x, x[:, :1]), batch_size=8)
"""


def test_a_job_s_own_optimizer_is_named_where_another_one_is_proved(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(SOURCE)

    def proof(*flags):
        assert main(["prove", "own.py:job", "--devices", "cpu:1", "--steps", "1", "--json", *flags]) == 0
        said = capsys.readouterr()
        return json.loads(said.out), said.err

    record, said = proof("--out", "sgd")
    assert record["job"]["optimizer"]["name"] == "SGD"
    assert "instead of the job's AdamW" in said
    assert (
        "To prove with that one: own_optimizer=True, on the command line --optimizer path/file.py:function"
        in said
    )
    assert "from the command line" not in said
    assert ("precision  fp64\n" in said, record["precision"]) == (True, "fp64")
    record, said = proof("--out", "adam", "--optimizer", "adam")
    assert record["job"]["optimizer"]["name"] == "Adam"
    assert "instead" not in said
    assert "(optimizer from the command line)" in said
    record, said = proof("--out", "bits", "--exactness", "bits")
    assert ("precision  fp32\n" in said, record["precision"]) == (True, "fp32")
    record, said = proof("--out", "given", "--precision", "tf32")
    assert "(precision from the command line)" in said
    assert ("precision  tf32\n" in said, record["precision"]) == (True, "tf32")


@pytest.mark.parametrize("name", ["tied", "job"])
def test_a_job_that_has_a_name_shows_it_where_it_is_another_one(tmp_path, monkeypatch, capsys, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(SOURCE.replace("batch_size=8", f"batch_size=8, name={name!r}"))
    assert main(["prove", "own.py:job", "--devices", "cpu:1", "--steps", "1", "--out", "proof"]) == 0
    line = capsys.readouterr().out.splitlines()[0]
    assert line == ("job        own.py:job" if name == "job" else "job        own.py:job, named tied")
    assert json.loads((tmp_path / "proof/proof.json").read_text())["model"] == name


@pytest.mark.parametrize(
    "flags",
    [
        "--devices 1,x",
        "--steps 0",
        "--strategy sideways",
        "--shards 0",
        "--out taken",
        "--exactness good",
        "--step-kind graph --devices cpu:1",
    ],
)
def test_input_that_cannot_work_is_the_only_thing_that_is_said(tmp_path, monkeypatch, capsys, flags):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "proof.json").write_text("{}")
    assert main(["prove", "mlp", "--batch-size", "8", *flags.split()]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("kway: error:")


def test_more_ranks_than_cores_are_warned_about(tmp_path, monkeypatch, capsys, forks):
    from kway.devices import topology

    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(SOURCE)
    real = topology.discover()
    one = dataclasses.replace(real, cpu={**real.cpu, "usable": 1})
    monkeypatch.setattr("kway.jobs.proving.discover", lambda: one)
    for devices, lines in (("cpu:1", []), ("1,2", ["note       2 CPU ranks share 1 usable core"])):
        words = ["--devices", devices, "--steps", "1", "--out", f"of-{devices}", "--optimizer", "sgd"]
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        assert main(["prove", "own.py:job", *words]) == 0
        said = capsys.readouterr()
        noted = [line.partition(": the result")[0] for line in said.out.splitlines() if "share 1" in line]
        assert (noted, said.err) == (lines, "")
        # The proof says it, and so does that of ``kway.prove``.
        notices = json.loads((tmp_path / f"of-{devices}" / "proof.json").read_text())["notices"]
        assert [f"note       {text}".partition(": the result")[0] for text in notices] == lines


def test_a_learning_rate_of_zero_is_noticed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(SOURCE)
    still = "note       with --lr 0 no weight moves\n"
    for model, lr, said in (("mlp", "0", 1), ("own.py:job", "0", 1), ("mlp", "0.1", 0)):
        flags = f"--devices cpu:1 --steps 1 --optimizer sgd --lr {lr} --out {said}{model[:3]}"
        assert main(["prove", model, *flags.split()]) in (0, 1)
        assert capsys.readouterr().out.count(still) == said
