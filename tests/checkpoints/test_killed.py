"""A process that saves in a loop is killed at random moments: the newest checkpoint is always whole."""

import os
import random
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kway.checkpoints.reading import newest

ROOT = Path(__file__).parents[2]
KILLS = 20


def run_and_kill(folder, size, delay):
    """Returns the last step that the process said was durable before it was killed, or ``None``."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "tests.checkpoints.saving_loop", str(folder), str(size)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT) as child:
        assert child.stdout.readline() == "ready\n"
        threading.Timer(delay, child.kill).start()
        lines = child.stdout.read().splitlines(keepends=True)
    whole = [line for line in lines if line.endswith("\n")]
    return int(whole[-1]) if whole else None


@pytest.mark.starts
@pytest.mark.timeout(240)
def test_k04_the_newest_is_whole_after_every_kill(tmp_path):
    draw = random.Random(4)
    folder = tmp_path / "c"
    said = -1
    unfinished = 0
    for _ in range(KILLS):
        last = run_and_kill(folder, 50_000, draw.uniform(0.0, 0.15))
        said = said if last is None else last
        warnings: list[str] = []
        read = newest(folder, warnings.append)
        assert warnings == []  # nothing but whole ones ever bears a final name
        if read is None:
            assert said == -1
            continue
        assert said <= read.step <= said + 1
        numbers = [read.weights()["w"], read.part("o")["m"]]
        assert all(tensor.eq(read.step).all() for tensor in numbers)
        parts = list(folder.glob(".step-*.part"))
        unfinished += len(parts)
        assert len(parts) <= 2
        said = read.step
    assert said >= 0
    assert unfinished > 0, "no kill hit a save"
    run_and_kill(folder, 50_000, 1.0)
    assert newest(folder).step > said
    assert len(list(folder.glob("step-*"))) <= 3  # what kills left over has gone
