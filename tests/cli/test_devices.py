import errno
import json
import os

import pytest

from kway.cli.devices import lines
from kway.cli.main import main
from kway.devices.simulated import simulated
from kway.records import Cluster


def test_json_is_the_record_and_nothing_else(capsys):
    assert main(["devices", "--json"]) == 0
    captured = capsys.readouterr()
    record = Cluster.from_dict(json.loads(captured.out))
    assert record.cpu["usable"] >= 1
    assert captured.err == ""


def test_text_names_everything(capsys):
    assert main(["devices"]) == 0
    out = capsys.readouterr().out
    for word in ("CPU", "memory", "GPUs", "gloo", "torch", "auto"):
        assert word in out


def test_misspelled_names_are_shown(capsys, monkeypatch):
    monkeypatch.setenv("CUDA_VISBLE_DEVICE", "0")
    assert main(["devices"]) == 0
    assert "warning: CUDA_VISBLE_DEVICE is set" in capsys.readouterr().out


def test_a_machine_with_gpus():
    text = "\n".join(lines(simulated(gpus=4, visible="2,0", over="host-bridge")))
    assert "2 of 4 visible" in text
    rows = [line.split() for line in text.splitlines()]
    assert [row[:2] for row in rows if row and row[0].startswith("cuda:")][:2] == [
        ["cuda:0", "2"],
        ["cuda:1", "0"],
    ]
    assert ["cuda:0", "-", "host-bridge"] in rows
    assert ["cuda:1", "host-bridge", "-"] in rows
    assert "hidden: left out by CUDA_VISIBLE_DEVICES=2,0" in text
    assert "nccl" in text
    assert "auto      cuda:0, cuda:1: all visible GPUs" in text


def test_links_say_how_many_and_whether_direct():
    cluster = simulated(gpus=2)
    cluster.links[0].update(nvlinks=18)
    assert "nvlink x18" in "\n".join(lines(cluster))
    cluster.links[0].update(over="sockets", nvlinks=None, peer=False)
    assert "(sockets)" in "\n".join(lines(cluster))


def test_gpus_that_this_torch_cannot_use():
    text = "\n".join(lines(simulated(gpus=2, torch_cuda=None)))
    assert "0 of 2 visible" in text
    assert "warning: the driver shows 2 GPUs" in text
    assert "auto      cpu:" in text


def test_out_writes_the_record(tmp_path, capsys):
    folder = tmp_path / "new" / "run"
    assert main(["devices", "--out", str(folder), "--json"]) == 0
    assert Cluster.load(folder).to_dict() == json.loads(capsys.readouterr().out)
    assert [path.name for path in folder.iterdir()] == ["cluster.json"]


def test_out_shows_the_record_only_when_it_is_whole(tmp_path, capsys, monkeypatch):
    named = []

    def on_a_full_disk(handle):
        named.extend(path.name for path in tmp_path.rglob("cluster.json"))
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", on_a_full_disk)
    assert main(["devices", "--out", str(tmp_path / "run")]) == 2
    assert "No space left on device" in capsys.readouterr().err
    assert named == []
    assert not (tmp_path / "run").exists()


def test_out_joins_a_folder_with_other_records(tmp_path):
    (tmp_path / "train.json").write_text("{}")
    assert main(["devices", "--out", str(tmp_path)]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cluster.json", "train.json"]


def test_out_refuses_to_overwrite(tmp_path, capsys):
    (tmp_path / "cluster.json").write_text("precious")
    assert main(["devices", "--out", str(tmp_path)]) == 2
    captured = capsys.readouterr()
    assert "already holds cluster.json" in captured.err
    assert captured.out == ""
    assert (tmp_path / "cluster.json").read_text() == "precious"


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_out_that_is_no_folder(tmp_path, capsys, name):
    (tmp_path / "file").write_text("precious")
    assert main(["devices", "--out", str(tmp_path / name)]) == 2
    assert str(tmp_path / name) in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "precious"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_out_that_may_not_be_written(tmp_path, capsys):
    tmp_path.chmod(0o555)
    try:
        assert main(["devices", "--out", str(tmp_path)]) == 2
        assert "cannot be written" in capsys.readouterr().err
    finally:
        tmp_path.chmod(0o755)
