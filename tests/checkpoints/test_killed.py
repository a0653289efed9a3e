"""A process that saves in a loop is killed at random moments: the newest checkpoint is always whole."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from kway.checkpoints.reading import newest

ROOT = Path(__file__).parents[2]
KILLS = 20


@pytest.fixture
def killer(tmp_path, leftovers):
    """Runs the saving loop for some seconds; gives the last number that it said was durable, or ``None``."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "tests.checkpoints.saving_loop", str(tmp_path / "c"), "50000"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, env=environment, cwd=ROOT, **pipes) as parent:
        assert parent.stdout.readline() == "ready\n"

        def run(seconds):
            parent.stdin.write(f"{seconds}\n")
            parent.stdin.flush()
            last = None
            while (line := parent.stdout.readline()) != "killed\n":
                last = float(line)
            return last

        yield run


@pytest.mark.starts
@pytest.mark.timeout(240)
def test_k04_the_newest_is_whole_after_every_kill(killer, tmp_path):
    draw = random.Random(4)
    folder = tmp_path / "c"
    said = -1.0
    unfinished = 0
    for _ in range(KILLS):
        last = killer(draw.uniform(0.0, 0.15))
        said = said if last is None else last
        warnings: list[str] = []
        read = newest(folder, warnings.append)
        assert warnings == []  # nothing but whole ones ever bears a final name
        if read is None:
            assert said == -1
            continue
        number = read.weights()["w"][0].item()
        assert said <= number <= said + 1
        assert int(number) == read.step
        assert all(tensor.eq(number).all() for tensor in (read.weights()["w"], read.part("o")["m"]))
        parts = list(folder.glob(".step-*.part"))
        unfinished += len(parts)
        assert len(parts) <= 2
        said = number
    assert said >= 0
    assert unfinished > 0, "no kill hit a save"
    killer(2.0)
    assert newest(folder).step > said
    assert len(list(folder.glob("step-*"))) <= 3  # what kills left over has gone
