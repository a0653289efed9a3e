"""The run that is killed: python job.py FOLDER DEVICES KIND, which says each step on standard output.

KIND ``lenet``: 200 steps at level bits, a checkpoint every 20 steps. KIND ``large``: weights of 50 MB, a checkpoint
every 3 steps. Each rank writes how many forward passes it has begun into FOLDER/rank-N.steps.
"""

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import kway
from kway.zoo import get

STEPS, EVERY, SHARDS, BATCH = 200, 20, 4, 32


class Counted(nn.Module):
    """Notes each training step of this rank in a file, outside of the run's own state."""

    def __init__(self, folder: str, inner: nn.Module, passes: int) -> None:
        super().__init__()
        self.inner, self.folder, self.passes, self.seen = inner, folder, passes, 0

    def forward(self, x: torch.Tensor) -> Any:
        """Run the model, and note that it was run."""
        if self.training:
            self.seen += 1
            Path(self.folder, f"rank-{os.environ.get('RANK', '0')}.steps").write_text(str(self.seen))
        return self.inner(x)


def lenet(folder: str) -> nn.Module:
    """Make the model of the soak test."""
    return Counted(folder, get("lenet")((1, 28, 28), 10), SHARDS)


def large(folder: str) -> nn.Module:
    """Make a model whose weights take 50 MB."""
    return Counted(folder, nn.Sequential(nn.Flatten(), nn.Linear(784, 15900), nn.Linear(15900, 10)), 1)


def main() -> None:
    """Train, or go on training."""
    folder, devices, kind = sys.argv[1:4]
    draw = torch.Generator().manual_seed(1)
    samples = 25 * BATCH - 7
    images = torch.rand(samples, 1, 28, 28, generator=draw)
    job = kway.Job(
        model=partial(lenet if kind == "lenet" else large, folder),
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.SGD, lr=0.05, momentum=0.9 if kind == "lenet" else 0.0),
        data=(images, torch.randint(10, (samples,), generator=draw)),
        batch_size=BATCH if kind == "lenet" else 4,
        name=kind,
    )

    def say(event: str, record: dict[str, Any]) -> None:
        if event in ("start", "step", "checkpoint", "warning"):
            taken = record.get("step")
            if event == "step":
                taken = (record["epoch"] - 1) * record["steps"] + record["step"]
            print(event, taken, record.get("text", ""), flush=True)

    run = kway.train(
        job,
        devices=devices,
        exactness="bits" if kind == "lenet" else "math",
        shards=SHARDS,
        epochs=10**6,
        steps=STEPS if kind == "lenet" else 10**6,
        out=folder,
        log_every=1,
        checkpoint_every=f"{EVERY}steps" if kind == "lenet" else "3steps",
        keep=2,
        resume=True,
        callbacks=[say],
    )
    print("end", run.record.weights_sha256, run.record.resumed_from_step, flush=True)


if __name__ == "__main__":
    try:
        main()
    except kway.StoppedError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
