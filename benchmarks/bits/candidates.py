"""What is timed: one level of exactness on a layout, as an engine of kway with its batches in place."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from itertools import cycle
from typing import Any

import torch
from torch import nn

import kway
from kway.data.parts import take_apart
from kway.step.build import build
from kway.step.inputs import move
from kway.strategies.engine import Engine
from kway.training.weights import fingerprint, unique_names
from kway.world import World
from kway.zoo import get

CLASSES = 10
BATCHES = 4
SHAPES = {"mlp": (1, 28, 28), "lenet": (1, 28, 28), "resnet18": (3, 32, 32)}


@dataclass(frozen=True)
class Setting:
    """One level on one set of kernels. ``threads``: intra-op CPU threads of a rank."""

    name: str
    level: str
    shards: int
    deterministic: bool
    threads: int


@contextmanager
def kernels(setting: Setting) -> Iterator[None]:
    """Let torch choose its algorithms as ``setting`` says: the flags are those of the process, not of an engine.

    Uninitialised memory is not filled on either side: what is compared is the work of the step.
    """
    filling: Any = import_module("torch.utils.deterministic")
    before = (
        torch.are_deterministic_algorithms_enabled(),
        filling.fill_uninitialized_memory,
        torch.get_num_threads(),
    )
    torch.use_deterministic_algorithms(setting.deterministic)
    filling.fill_uninitialized_memory = False
    torch.set_num_threads(setting.threads)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        filling.fill_uninitialized_memory = before[1]
        torch.set_num_threads(before[2])


def job_of(model: str, batch: int, precision: str) -> kway.Job:
    """Make the job: a few batches of random images and labels, SGD with momentum."""
    shape = SHAPES[model]
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(BATCHES * batch, *shape, generator=generator)
    labels = torch.randint(CLASSES, (BATCHES * batch,), generator=generator)
    return kway.Job(
        model=partial(get(model), shape, CLASSES),
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.SGD, lr=0.01, momentum=0.9),
        data=(images, labels),
        batch_size=batch,
        precision=precision,
        name=model,
    )


class Candidate:
    """An opened engine. Its batches lie on the device, so that reading them is in no time."""

    def __init__(self, job: kway.Job, setting: Setting, layout: dict[str, int], world: World) -> None:
        self.setting = setting
        parts = take_apart(job.data, batch_size=job.batch_size, seed=job.seed, shuffle=True)
        self.engine = Engine(
            job, build(job), layout, world, setting.level, parts.order.batch_size, setting.shards
        )
        self._shares = []
        for step in range(parts.order.steps(0)):
            share = self.engine.cut(parts, parts.order.batch(0, step), 0, step)
            placed = [(move(batch, self.engine.device), count) for batch, count in share.micro]
            self._shares.append(replace(share, micro=placed))
        self._turns = cycle(self._shares)
        self._step = 0

    def run(self, steps: int) -> torch.Tensor:
        """Take optimizer steps; return the loss of the last one, on the device."""
        loss = torch.zeros(())
        for _ in range(steps):
            loss = self.engine.step(next(self._turns), self._step).loss
            self._step += 1
        return loss

    def weights_sha256(self) -> str:
        """Return the fingerprint of parameters and buffers. A collective."""
        return fingerprint(self.engine.state(), unique_names(self.engine.model))

    def close(self) -> None:
        """Take kway's changes off the model and out of torch's flags."""
        self.engine.close()
