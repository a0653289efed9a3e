import errno
import json
import os
from dataclasses import replace

import pytest

from kway.cli._machine import attributes
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


def test_the_row_that_applied_is_shown(capsys):
    assert main(["devices"]) == 0
    assert "rule 5: CPUs over Ethernet -> Gloo" in capsys.readouterr().out
    cluster = simulated(gpus=2, over="sockets")
    text = "\n".join(lines(cluster))
    assert "rule 2: GPUs over PCIe -> NCCL; between machines rule 4: GPUs over Ethernet -> NCCL" in text


def test_what_is_around_the_devices():
    node = {"processors": "0-3", "count": 4, "memory_total": 1 << 30, "distances": [10, 20]}
    port = {
        "device": "mlx5_0",
        "port": 1,
        "layer": "InfiniBand",
        "state": "ACTIVE",
        "rate": "400 Gb/sec (4X NDR)",
    }
    cluster = replace(
        simulated(gpus=2),
        numa=[{**node, "node": 0}, {**node, "node": 1, "processors": ""}],
        infiniband=[port, port | {"device": "mlx5_1", "layer": "Ethernet", "state": "DOWN", "rate": ""}],
        interfaces=[{"name": "eth0", "kind": "Ethernet", "bits_s": 25 * 10**9}],
        mps={"name": "Apple M1", "memory_total": 1 << 30, "usable": True, "why": "no ranks"},
        driver_cuda="13.0",
    )
    cluster.gpus[1]["numa_node"] = 1
    text = "\n".join(lines(cluster))
    for line in (
        "NUMA 0    processors 0-3, 1.0 GiB\n",
        "NUMA 1    processors none, 1.0 GiB, cuda:1\n",
        "IB        mlx5_0 port 1: ACTIVE, 400 Gb/sec (4X NDR)\n",
        "IB        mlx5_1 port 1: DOWN, ?, carries Ethernet\n",
        "network   eth0: Ethernet, 25 Gbit/s\n",
        "MPS       Apple M1, 1.0 GiB shared with the CPU: no ranks\n",
        "driver    simulated, runs CUDA 13.0 at most\n",
    ):
        assert line in text
    assert "NUMA" not in "\n".join(lines(replace(cluster, numa=cluster.numa[:1])))


def test_attributes_of_devices_that_are_alike_stand_together():
    card = {
        "l2_bytes": 50 << 20, "clock_hz": 1_980_000_000, "memory_bytes_s": 3.35e12, "compute_capability": [9, 0],
        "grid": [1, 2, 3], "integrated": False, "warp_size": 32,
    }  # fmt: skip
    found = list(attributes({"cpu": {}, "cuda:0": card, "cuda:1": {"warp_size": 64}, "cuda:2": dict(card)}))
    assert [line for line in found if line.startswith("attributes")] == [
        "attributes of cpu: none told",
        "attributes of cuda:0, cuda:2",
        "attributes of cuda:1",
    ]
    rows = dict(line.strip().split("  ", 1) for line in found if line.startswith("  "))
    assert {name: value.strip() for name, value in rows.items()} == {
        "L2": "50.0 MiB", "clock": "1,980 MHz", "memory rate": "3.35 TB/s", "compute capability": "9.0",
        "grid": "1 2 3", "integrated": "no", "warp size": "64",
    }  # fmt: skip


def test_attributes_of_this_machine(capsys):
    assert main(["devices", "--attributes", "--json"]) == 0
    cpu = json.loads(capsys.readouterr().out)["attributes"]["cpu"]
    assert cpu["page_bytes"] == os.sysconf("SC_PAGE_SIZE")
    assert main(["devices", "--attributes"]) == 0
    out = capsys.readouterr().out
    assert "attributes of cpu" in out
    assert "auto" in out


def test_the_doctor_tries_this_installation(capsys, tmp_path):
    code = main(["devices", "--doctor", "--out", str(tmp_path)])
    out = capsys.readouterr().out
    record = Cluster.load(tmp_path)
    outcomes = {check["name"]: check["outcome"] for check in record.checks}
    assert outcomes["torch"] == outcomes["Gloo"] == outcomes["loopback"] == "ok"
    assert code == int("fail" in outcomes.values())
    assert len(out.splitlines()) == len(record.checks) + 1 + sum(bool(check["do"]) for check in record.checks)
    assert "loads and computes" in out.splitlines()[0]


def test_a_check_that_fails_ends_with_1(capsys, monkeypatch, tmp_path):
    # A folder of the user's own that hides torch.
    (tmp_path / "torch.py").write_text("raise ImportError('no torch')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert main(["devices", "--doctor"]) == 1
    captured = capsys.readouterr()
    assert captured.out.startswith(
        "fail  torch            loading torch ended with exit code 1: ImportError: no torch\n"
    )
    assert "to do: mend or replace torch" in captured.out
    assert "1 fail" in captured.out


def test_ranks_on_mps_are_refused(capsys):
    assert main(["train", "lenet", "--devices", "mps"]) == 2
    assert "no ranks on MPS devices" in capsys.readouterr().err
