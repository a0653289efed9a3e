"""A process that does nothing but save, to be killed: ``python -m tests.checkpoints.saving_loop FOLDER SIZE``.

Goes on from the newest checkpoint, and prints the step of each that became durable.
"""

import sys
from itertools import count
from pathlib import Path

import torch

from kway.checkpoints.reading import newest
from kway.checkpoints.snapshot import Snapshot
from kway.checkpoints.writer import Writer


def loop(folder: Path, size: int) -> None:
    """Save states of ``size`` numbers, each number being the step."""
    last = newest(folder)
    print("ready", flush=True)
    with Writer(folder, keep=2) as writer:
        for step in count(0 if last is None else last.step + 1):
            writer.save(
                Snapshot(step, 0, {"w": torch.full((size,), step)}, {"o": {"m": torch.full((size,), step)}})
            )
            writer.wait()
            print(step, flush=True)


if __name__ == "__main__":
    loop(Path(sys.argv[1]), int(sys.argv[2]))
