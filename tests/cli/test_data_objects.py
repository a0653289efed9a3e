"""Data of the user's own on the command line: streams, classes of data sets, inputs without targets."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils.data import DataLoader

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


def test_a_loader_is_not_run_to_find_the_usual_loss(here, capsys, monkeypatch):
    def run(self):
        raise AssertionError("the loader was run")

    monkeypatch.setattr(DataLoader, "__iter__", run)
    flags = "--batch-size 8 --workers 0 --epochs 1 --devices cpu:1 --out run --json"
    record = kway(f"train own.py:model --data own.py:loader {flags}", capsys)
    assert "train_accuracy" in record["epochs"][0]


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
