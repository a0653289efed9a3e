"""The work that is timed, written by hand and with kway: one epoch on arrays in memory."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import kway
from kway.data.sources import load
from kway.zoo import get

LENGTH, BYTES = 128, 256

Epoch = Callable[[int], Tensor]
"""Trains one epoch, given its number, and returns the loss of the last batch (this rank's share)."""


def lenet() -> nn.Module:
    """Make the network, for images of shape (n, 1, 28, 28), with torch's own initial weights."""
    return nn.Sequential(
        nn.Conv2d(1, 20, 3), nn.ReLU(), nn.AvgPool2d(2),
        nn.Conv2d(20, 50, 5), nn.ReLU(), nn.AvgPool2d(2),
        nn.Flatten(), nn.Linear(800, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip


def resnet18() -> nn.Module:
    """Make the ResNet-18 of kway's examples, for images of shape (n, 1, 28, 28)."""
    return get("resnet18")((1, 28, 28), 10)


def gpt() -> nn.Module:
    """Make the decoder of kway's examples in its smallest size, for rows of 128 bytes."""
    return get("gpt-1m")((LENGTH,), BYTES)


def images(samples: int) -> tuple[Tensor, Tensor]:
    """Make images (samples, 1, 28, 28) in [0, 1], a noisy pattern a class, and their labels.

    One label in ten is wrong, so that the loss does not sink to where denormal numbers change the timing.
    """
    generator = torch.Generator().manual_seed(0)
    patterns = torch.rand(10, 1, 28, 28, generator=generator)
    labels = torch.randint(10, (samples,), generator=generator)
    noise = torch.rand(samples, 1, 28, 28, generator=generator)
    pictures = 0.8 * patterns[labels] + 0.2 * noise
    wrong = torch.rand(samples, generator=generator) < 0.1
    return pictures, torch.where(wrong, torch.randint(10, (samples,), generator=generator), labels)


def text(samples: int) -> tuple[Tensor, Tensor]:
    """Read rows of 128 bytes of the text that comes with Python, and the byte that follows each; int64."""
    return load("text").train.take(np.arange(samples, dtype=np.int64))


def sgd(parameters: Any, lr: float) -> torch.optim.Optimizer:
    """Make SGD with momentum."""
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9)


@dataclass(frozen=True)
class Work:
    """One epoch: a network, how many samples (a multiple of ``batch``) in global batches of ``batch``.

    ``warm_up`` rounds are not counted, ``rounds`` is the fewest that are; a candidate whose last loss is not
    below ``learnt`` has not done the work. ``exactness``: kway's level. ``arrays``: makes inputs and targets of so
    many samples. ``optimizer`` is given parameters and a rate.
    """

    model: Callable[[], nn.Module]
    samples: int
    batch: int = 256
    learning_rate: float = 0.1
    warm_up: int = 3
    rounds: int = 15
    learnt: float = 1.5
    exactness: str = "math"
    arrays: Callable[[int], tuple[Tensor, Tensor]] = images
    optimizer: Callable[..., torch.optim.Optimizer] = sgd

    @property
    def steps(self) -> int:
        """Steps in a round."""
        return self.samples // self.batch


WORKS = {
    "lenet": Work(lenet, 4_096),
    # As many samples as Fashion-MNIST has in whole batches: the two sides cut a partial one differently. At a rate of
    # 0.1 so many steps with momentum end on a plateau at times.
    "lenet-epoch": Work(lenet, 234 * 256, learning_rate=0.02, warm_up=1, rounds=5, exactness="loose"),
    # Ten counted rounds of 6 steps. Batch statistics are each rank's on both sides.
    "resnet18": Work(
        resnet18,
        6 * 16,
        batch=16,
        learning_rate=0.02,
        warm_up=1,
        rounds=10,
        learnt=2.0,
        exactness="loose",
    ),
    # Ten counted rounds of 6 steps of 2,048 bytes.
    "gpt-1m": Work(
        gpt,
        6 * 16,
        batch=16,
        learning_rate=1e-3,
        warm_up=1,
        rounds=10,
        learnt=4.0,
        arrays=text,
        optimizer=torch.optim.AdamW,
    ),
    "tiny-gpt": Work(
        gpt,
        4,
        batch=2,
        learning_rate=1e-3,
        warm_up=1,
        rounds=5,
        learnt=6.0,
        arrays=text,
        optimizer=torch.optim.AdamW,
    ),
    "tiny": Work(lenet, 512, batch=32, warm_up=1, rounds=5, learnt=3.0),
}


def by_hand(work: Work, inputs: Tensor, labels: Tensor, rank: int, size: int) -> Epoch:
    """The loop that a careful engineer writes: resident tensors, a permutation, DDP for several ranks."""
    torch.manual_seed(0)
    model: nn.Module = work.model()
    if size > 1:
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = work.optimizer(model.parameters(), lr=work.learning_rate)
    criterion = nn.CrossEntropyLoss()
    share = work.batch // size

    def epoch(number: int) -> Tensor:
        order = torch.randperm(work.samples, generator=torch.Generator().manual_seed(number))
        loss = torch.zeros(())
        for start in range(rank * share, work.samples, work.batch):
            chosen = order[start : start + share]
            loss = criterion(model(inputs[chosen]), labels[chosen])
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        return loss.detach()

    return epoch


@contextmanager
def with_kway(work: Work, inputs: Tensor, labels: Tensor) -> Iterator[Epoch]:
    """The same work through the public API, in the ranks that are there."""
    job = kway.Job(
        model=work.model,
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(work.optimizer, lr=work.learning_rate),
        data=(inputs, labels),
        batch_size=work.batch,
        seed=0,
    )
    with kway.parallel(job, exactness=work.exactness) as p:

        def epoch(number: int) -> Tensor:
            loss = torch.zeros(())
            for batch in p.batches(number):
                loss = p.step(batch)
            return torch.as_tensor(loss)

        yield epoch


def barrier() -> None:
    """Wait for all ranks, so that no candidate pays for another's laggard."""
    if dist.is_initialized():
        dist.barrier()


def slowest(seconds: float) -> float:
    """Return the largest of all ranks' times, which is the same number on every rank."""
    if not dist.is_initialized():
        return seconds
    value = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return float(value)
