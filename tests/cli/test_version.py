import dataclasses
import subprocess
import sys

import pytest

import kway
from kway.cli._version import lines
from kway.cli.main import main
from kway.devices.topology import discover

GPU = {"index": 0, "physical": 0, "name": "NVIDIA H200", "uuid": "u"}


def build(**facts):
    return {"version": "2.13.0", "cuda": None, "hip": None, "git": "x", "remembered": {}} | facts


def shown(**changes):
    found = dict(line.split(maxsplit=1) for line in lines(dataclasses.replace(discover(), **changes)))
    assert len(found) >= 7
    return found


def test_it_shows_what_this_machine_has(capsys):
    assert main(["--version"]) == 0
    text = capsys.readouterr().out.splitlines()
    assert text[0] == f"kway {kway.__version__}"
    assert [line.split()[0] for line in text if not line.startswith("driver")] == [
        "kway", "torch", "NCCL", "Python", "system", "CPU", "GPUs",
    ]  # fmt: skip
    python = ".".join(map(str, sys.version_info[:3]))
    assert any(python in line for line in text)


@pytest.mark.parametrize(
    ("facts", "torch", "nccl"),
    [
        (build(cuda="13.0", remembered={"nccl": "2.28.3"}), "2.13.0, CUDA 13.0", "2.28.3"),
        (build(remembered={"nccl": None}), "2.13.0, without CUDA", "none in this torch"),
        (build(hip="7.0"), "2.13.0, ROCm 7.0", "unknown"),
        (build(), "2.13.0, without CUDA", "none in this torch"),
        (build(cuda="99.0"), "2.13.0, CUDA 99.0", "unknown until torch has been imported once"),
        (build(version=None), "not installed", "none in this torch"),
    ],
)
def test_builds_of_torch(facts, torch, nccl):
    found = shown(torch=facts)
    assert (found["torch"], found["NCCL"]) == (torch, nccl)


def test_gpus_are_counted_by_name():
    cards = [GPU, GPU, {**GPU, "name": "NVIDIA A10"}]
    assert shown(gpus=cards, hidden=[])["GPUs"] == "2 x NVIDIA H200, 1 x NVIDIA A10"
    assert shown(gpus=cards[:1], hidden=cards[:2])["GPUs"] == "1 x NVIDIA H200; 2 hidden"
    assert shown(driver="570.1")["driver"] == "570.1"


def test_no_torch_is_imported():
    code = (
        "import sys; from kway.cli.main import main; code = main(['--version']); "
        "sys.exit(code or 'torch' in sys.modules or 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0
