import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = [pytest.mark.starts, pytest.mark.usefixtures("leftovers")]

HERE = Path(__file__).resolve().parent
_spec = importlib.util.spec_from_file_location("injector", HERE / "injector.py")
injector = sys.modules["injector"] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(injector)
Fault, environment = injector.Fault, injector.environment

STEPS = """
import os, sys
sys.path.insert(0, os.environ["KWAY_TEST_INJECTOR"])
from injector import point
for step in range(6):
    print(step, flush=True)
    point()
    with open(sys.argv[1], "ab", buffering=0) as file:
        file.write(b"x" * 1000)
"""
MODEL = """
import os, sys
sys.path.insert(0, os.environ["KWAY_TEST_INJECTOR"])
import torch
from injector import point

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(784, 10)
    def forward(self, x):
        point(self)
        return self.linear(x.flatten(1))
"""


def start(tmp_path, *faults, rank=1):
    env = {**os.environ, **environment(*faults), "RANK": str(rank)}
    command = [sys.executable, "-S", "-c", STEPS, str(tmp_path / "out")]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def steps_of(process):
    out, errors = process.communicate(timeout=30)
    return out.split(), errors


@pytest.mark.parametrize(
    ("fault", "status", "last"),
    [
        (Fault("kill", 1, 3), -9, "3"),
        (Fault("exit", 1, 2, code=42), 42, "2"),
        (Fault("raise", 1, 4), 1, "4"),
        (Fault("kill", 1, 2, calls_per_step=2), -9, "4"),
        (Fault("kill", 0, 3), 0, "5"),
        (Fault("fill_disk", 1, 2, size=2_000), 1, "2"),
    ],
    ids=["kill", "exit", "raise", "calls", "other rank", "file size"],
)
def test_a_fault_strikes_at_its_rank_and_step(fault, status, last, tmp_path):
    process = start(tmp_path, fault)
    steps, errors = steps_of(process)
    assert (process.returncode, steps[-1]) == (status, last), errors
    if fault.kind == "raise":
        assert "InjectedError: rank 1, step 4" in errors
    if fault.kind == "fill_disk":
        assert "File too large" in errors


def test_a_fault_that_strikes_once_leaves_a_mark_and_spares_the_next_process(tmp_path):
    fault = Fault("exit", 1, 2, once=str(tmp_path / "struck"))
    assert len(steps_of(start(tmp_path, fault))[0]) == 3
    assert (tmp_path / "struck").exists()
    second = start(tmp_path, fault)
    assert (len(steps_of(second)[0]), second.returncode) == (6, 0)


def test_a_stopped_process_goes_on_when_it_may(tmp_path):
    process = start(tmp_path, Fault("stop", 1, 1))
    deadline = time.monotonic() + 10
    while _state(process.pid) != "T" and time.monotonic() < deadline:
        time.sleep(0.01)
    assert _state(process.pid) == "T"
    process.send_signal(signal.SIGCONT)
    assert (len(steps_of(process)[0]), process.returncode) == (6, 0)


def _state(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_slow_rank_is_slow_for_as_many_steps_as_said(tmp_path):
    began = time.monotonic()
    assert len(steps_of(start(tmp_path, Fault("slow", 1, 1, steps=3, seconds=0.2)))[0]) == 6
    assert time.monotonic() - began > 0.6


def test_bytes_of_the_newest_file_are_flipped_and_nothing_else(tmp_path):
    (tmp_path / "a").mkdir()
    for name, when in (("a/old.bin", 1), ("a/new.bin", 2)):
        (tmp_path / name).write_bytes(bytes(100))
        os.utime(tmp_path / name, (when, when))
    fault = Fault("corrupt", 1, 0, path=str(tmp_path / "**" / "*.bin"), size=3)
    steps_of(start(tmp_path, fault))
    content = (tmp_path / "a" / "new.bin").read_bytes()
    assert sorted(content) == [0] * 97 + [255] * 3
    assert (tmp_path / "a" / "old.bin").read_bytes() == bytes(100)


def test_a_small_disk_is_filled_and_a_large_one_is_not(tmp_path):
    with pytest.raises(ValueError, match="is not filled"):
        injector.fill(tmp_path)
    (tmp_path / "disk").mkdir()
    try:
        with injector.small_disk(tmp_path / "disk", 1 << 20) as disk:
            injector.fill(disk)
            with pytest.raises(OSError, match="No space left"):
                (disk / "more").write_bytes(b"x" * 100)
    except injector.NoRightsError as reason:
        pytest.skip(str(reason))
    assert list((tmp_path / "disk").iterdir()) == []


def test_unknown_kinds_are_named():
    with pytest.raises(ValueError, match="known are kill, stop"):
        Fault("explode", 0, 0)


@pytest.mark.usefixtures("forked_commands")
def test_a_training_run_meets_its_fault(tmp_path):
    (tmp_path / "file.py").write_text(MODEL)
    fault = Fault("exit", 1, 3, code=42, once=str(tmp_path / "struck"))
    words = "--data synthetic --devices cpu:2 --steps 6 --batch-size 8 --out"
    done = subprocess.run(
        [sys.executable, "-m", "kway", "train", "file.py:Model", *words.split(), "run"],
        env={**os.environ, **environment(fault)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 42, done.stderr
    assert done.stderr.splitlines()[-1] == "kway: error: rank 1 failed: its process left with exit code 42"
    assert (tmp_path / "struck").exists()
    assert json.loads(environment(fault)["KWAY_TEST_FAULTS"])[0]["code"] == 42
