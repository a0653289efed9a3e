"""Processes that do nothing but save, and are killed: ``python -m tests.checkpoints.saving_loop FOLDER SIZE``.

For each number of seconds that it reads, one is forked, which saves for so long and is then killed. The parent has
imported torch and started no thread, so a fork takes milliseconds and is safe.
"""

import os
import signal
import sys
import time
from itertools import count
from pathlib import Path

import torch

from kway.checkpoints.reading import newest
from kway.checkpoints.snapshot import Snapshot
from kway.checkpoints.writer import Writer


def loop(folder: Path, size: int) -> None:
    """Go on from the newest checkpoint, and print each number that became durable.

    Saves states of ``size`` numbers, each step twice: all numbers are the step, and then the step and a half.
    """
    last = newest(folder)
    with Writer(folder, keep=2) as writer:
        for step in count(0 if last is None else last.step + 1):
            for number in (step, step + 0.5):
                weights = {"w": torch.full((size,), number)}
                writer.save(Snapshot(step, 0, weights, {"o": {"m": torch.full((size,), number)}}))
                writer.wait()
                os.write(1, f"{number}\n".encode())  # at once or not at all, which print does not promise


def main(folder: Path, size: int) -> None:
    torch.set_num_threads(1)
    print("ready", flush=True)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            loop(folder, size)
        time.sleep(float(line))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        print(
            "killed" if os.WTERMSIG(status) == signal.SIGKILL else f"ended by itself ({status})", flush=True
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
