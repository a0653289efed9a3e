"""A rank on a GPU is killed: the run goes on with the rest, to the same bits, and leaves no memory behind."""

import json
import os
import subprocess
import sys
import time

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.starts, pytest.mark.usefixtures("leftovers")]

NET = """
import os, pathlib, signal
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2),
            nn.Linear(16 * 26 * 26, 10),
        )
        self.passes = 0

    def forward(self, x):
        if self.training:
            self.passes += 1
            once = pathlib.Path(os.environ.get("KILL_ONCE", "/nowhere"))
            if self.passes == 30 and os.environ.get("RANK") == os.environ.get("KILL_RANK") and once.exists():
                once.unlink()
                os.kill(os.getpid(), signal.SIGKILL)
        return self.body(x)
"""


def train(folder, out, *more, **environment):
    fixed = (
        "--data synthetic --batch-size 64 --exactness bits --shards 4 --checkpoint-every 5steps --steps 40"
    )
    command = [sys.executable, "-m", "kway", "train", "net.py:Net", *fixed.split(), "--out", out, *more]
    done = subprocess.run(
        command,
        cwd=folder,
        check=False,
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / out / "train.json").read_text())


def used():
    """Bytes in use on each GPU, by whomever."""
    return [total - free for free, total in map(torch.cuda.mem_get_info, range(torch.cuda.device_count()))]


@pytest.mark.timeout(500)
@pytest.mark.parametrize("count", [2, 4])
def test_a_killed_rank_is_gone_on_without_to_the_same_bits(tmp_path, count):
    if torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} CUDA devices, torch sees {torch.cuda.device_count()}")
    (tmp_path / "net.py").write_text(NET)
    before = used()
    whole = train(tmp_path, "whole", "--devices", "cuda:0")
    (tmp_path / "once").touch()
    devices = "cuda:" + ",".join(map(str, range(count)))
    faulty = {"KILL_ONCE": str(tmp_path / "once"), "KILL_RANK": str(count - 1)}
    again = train(tmp_path, "again", "--devices", devices, "--max-restarts", "1", **faulty)
    assert again["devices"] == count - 1
    assert again["resumed_from_step"] > 0
    assert again["weights_sha256"] == whole["weights_sha256"]
    deadline = time.monotonic() + 10
    while any(now - then > 64 << 20 for now, then in zip(used(), before, strict=True)):
        assert time.monotonic() < deadline, (before, used())
        time.sleep(0.2)
