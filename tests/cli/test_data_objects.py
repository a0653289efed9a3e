"""Data of the user's own on the command line: streams, classes of data sets, inputs without targets."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils.data import DataLoader

from kway.cli._job import amounts
from kway.cli.main import main

SOURCE = """
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

X = torch.randn(23, 4, generator=torch.Generator().manual_seed(0))

class Stream(IterableDataset):
    def __iter__(self):
        return ((x, int(x.sum() > 0)) for x in X)

class Rows(Dataset):
    def __len__(self):
        return len(X)

    def __getitem__(self, index):
        return X[index], int(X[index].sum() > 0)

def loader():
    return DataLoader(Rows(), batch_size=8, shuffle=True, num_workers=2)

def own_batches():
    return DataLoader(Rows(), batch_sampler=[[0, 1, 2], [3, 4]])

def held_out():
    return loader(), DataLoader(Rows(), batch_size=6)

def pair():
    return Stream(), Stream()

def model():
    return torch.nn.Linear(4, 2)
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(SOURCE)
    return tmp_path


def kway(words, capsys):
    code = main(words.split())
    captured = capsys.readouterr()
    assert code == 0, captured.err
    return json.loads(captured.out)


def test_a_stream_trains_as_the_same_rows_in_order(here, capsys):
    records = [
        kway(
            f"train own.py:model --data own.py:{name} --batch-size 8 --epochs 2 --devices cpu:1 --out {name} --json",
            capsys,
        )
        for name in ("Stream", "pair")
    ]
    assert records[0]["weights_sha256"] == records[1]["weights_sha256"]
    assert [epoch["samples"] for epoch in records[0]["epochs"]] == [23, 23]
    assert records[1]["epochs"][-1]["accuracy"] > 0.5


def test_the_class_of_a_data_set_is_called(here, capsys):
    record = kway("train own.py:model --data own.py:Rows --epochs 1 --devices cpu:1 --out run --json", capsys)
    assert record["epochs"][0]["samples"] == 23


@pytest.mark.starts
def test_loader_workers_get_what_the_file_defines(here, capsys):
    run = "train own.py:model --data own.py:loader --epochs 1 --devices cpu:1 --out run --json"
    assert kway(run, capsys)["epochs"][0]["samples"] == 23


def test_a_loader_is_not_run_to_find_the_usual_loss(here, capsys, monkeypatch):
    def run(self):
        raise AssertionError("the loader was run")

    monkeypatch.setattr(DataLoader, "__iter__", run)
    flags = "--batch-size 8 --workers 0 --epochs 1 --devices cpu:1 --out run --json"
    record = kway(f"train own.py:model --data own.py:loader {flags}", capsys)
    assert "train_accuracy" in record["epochs"][0]


SIZES = [
    ("own.py:model --data own.py:loader", 8, None),
    ("own.py:model --data own.py:loader --batch-size 5", 5, "batch size 5 instead of the DataLoader's 8"),
    ("own.py:job", 8, None),
    ("own.py:job --batch-size 5", 5, "batch size 5 instead of the DataLoader's 8"),
    ("own.py:model --data own.py:own_batches", 3, None),
    ("own.py:model --data own.py:rows --loss own.py:flat", 256, None),
]
JOB = """
import kway

rows = X, X[:, :1]
job = kway.Job(model=model, loss=torch.nn.CrossEntropyLoss(), optimizer=torch.optim.SGD, data=loader())

def flat(output, target):
    return (output[:, :1] - target).square()
"""


@pytest.mark.parametrize(("words", "size", "said"), SIZES)
def test_a_loader_s_batch_size_counts_unless_one_is_given(here, capsys, words, size, said):
    (here / "own.py").write_text(SOURCE + JOB)
    flags = f"{words} --workers 0 --devices cpu:1 --json"
    record = kway(f"train {flags} --epochs 1 --out run", capsys)
    assert (record["batch_size"], record["steps"]) == (size, -(-23 // size) if size != 3 else 2)
    notices = [line for line in record["notices"] if "batch size" in line]
    assert notices == ([said] if said else [])
    proof = kway(f"prove {flags} --steps 1", capsys)
    assert proof["batch_size"] == min(size, 23)
    assert [line for line in proof["notices"] if "batch size" in line] == notices


def test_what_the_command_says_of_the_batch_is_what_it_takes(here, capsys):
    flags = "--workers 0 --epochs 1 --devices cpu:1 --out"
    for place, (given, said) in enumerate(
        [
            ("loader", "8 (global)"),
            ("loader --batch-size 5", "5 (global)"),
            ("own_batches", "as list makes it"),
        ]
    ):
        assert main(f"train own.py:model --data own.py:{given} {flags} run{place}".split()) == 0
        assert f"batch      {said}" in capsys.readouterr().out


def test_a_batch_sampler_of_one_s_own_takes_no_batch_size(here, capsys):
    for command in ("train", "prove"):
        words = f"{command} own.py:model --data own.py:own_batches --batch-size 4 --devices cpu:1"
        assert main(words.split()) == 2
        assert "leave batch_size (--batch-size) out" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["evaluate", "predict"])
@pytest.mark.parametrize("data", ["loader", "held_out"])
def test_a_batch_size_counts_where_weights_are_judged(here, capsys, command, data):
    save_file(torch.nn.Linear(4, 2).state_dict(), here / "w.safetensors")
    words = f"{command} own.py:model --weights w.safetensors --data own.py:{data} --workers 0 --devices cpu:1 --json"
    said = []
    for given in ("", " --batch-size 5"):
        assert main((words + given).split()) == 0
        said.append("batch size 5 instead of the DataLoader's" in capsys.readouterr().err)
    assert said == [False, True]


def test_a_proof_of_a_stream(here, capsys):
    proof = kway("prove own.py:model --data own.py:Stream --batch-size 8 --devices cpu:1 --json", capsys)
    assert proof["verdict"] == "pass"
    assert "Stream is a stream: its first 23 items are read into memory" in proof["notices"]


def test_a_prediction_needs_no_targets(here, capsys):
    layer = torch.nn.Linear(4, 2)
    save_file(layer.state_dict(), here / "w.safetensors")
    kway(
        "predict own.py:model --weights w.safetensors --data own.py:X --devices cpu:1 --out p --json", capsys
    )
    x = torch.randn(23, 4, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(load_file(here / "p" / "predictions.safetensors")["output"], layer(x).detach())


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ((torch.ones(23, 4), torch.ones(23)), "23 to train on"),
        ({"x": torch.ones(23, 4), "target": torch.ones(23)}, "23 to train on"),
        ([torch.ones(23, 4), torch.ones(23)], "23 to train on"),
        (((torch.ones(23, 4), torch.ones(23, 2)), torch.ones(23)), "23 to train on"),
        ([(torch.ones(4), 1), (torch.ones(4), 0), (torch.ones(4), 1)], "3 to train on"),
        (DataLoader(range(23), sampler=[1, 2, 3]), "3 to train on"),
        (DataLoader(range(23), batch_sampler=[[0, 1], [2]]), "training data"),
        (iter(range(3)), "training data"),
    ],
)
def test_samples_are_counted_without_reading_any(found, said):
    assert amounts(found) == said
    assert amounts(found, range(5)) == f"{said}, 5 held out"
    assert amounts(range(4), iter(range(3))) == "4 to train on, validation data"


def test_a_run_on_data_from_a_file_says_how_many_samples_there_are(here, capsys):
    flags = "--workers 0 --steps 1 --devices cpu:1 --out run"
    assert main(f"train own.py:model --data own.py:held_out {flags}".split()) == 0
    assert "data       own.py:held_out: 23 to train on, 23 held out\n" in capsys.readouterr().out
