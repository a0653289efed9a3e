"""The work that is timed, written by hand and with kway: one epoch of LeNet on arrays in memory."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import kway

SAMPLES = 4_096
BATCH = 256
STEPS = SAMPLES // BATCH
LEARNING_RATE = 0.1
MOMENTUM = 0.9

Epoch = Callable[[int], Tensor]
"""Trains one epoch, given its number, and returns the loss of the last batch (this rank's share)."""


def lenet() -> nn.Module:
    """Make the network, for images of shape (n, 1, 28, 28), with torch's own initial weights."""
    return nn.Sequential(
        nn.Conv2d(1, 20, 3), nn.ReLU(), nn.AvgPool2d(2),
        nn.Conv2d(20, 50, 5), nn.ReLU(), nn.AvgPool2d(2),
        nn.Flatten(), nn.Linear(800, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip


def arrays() -> tuple[Tensor, Tensor]:
    """Make images (SAMPLES, 1, 28, 28) in [0, 1], a noisy pattern a class, and their labels.

    One label in ten is wrong, so that the loss does not sink to where denormal numbers change the timing.
    """
    generator = torch.Generator().manual_seed(0)
    patterns = torch.rand(10, 1, 28, 28, generator=generator)
    labels = torch.randint(10, (SAMPLES,), generator=generator)
    noise = torch.rand(SAMPLES, 1, 28, 28, generator=generator)
    images = 0.8 * patterns[labels] + 0.2 * noise
    wrong = torch.rand(SAMPLES, generator=generator) < 0.1
    return images, torch.where(wrong, torch.randint(10, (SAMPLES,), generator=generator), labels)


def by_hand(images: Tensor, labels: Tensor, rank: int, size: int) -> Epoch:
    """The loop that a careful engineer writes: resident tensors, a permutation, DDP for several ranks."""
    torch.manual_seed(0)
    model: nn.Module = lenet()
    if size > 1:
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
    criterion = nn.CrossEntropyLoss()
    share = BATCH // size

    def epoch(number: int) -> Tensor:
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(number))
        loss = torch.zeros(())
        for start in range(rank * share, SAMPLES, BATCH):
            chosen = order[start : start + share]
            loss = criterion(model(images[chosen]), labels[chosen])
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        return loss.detach()

    return epoch


@contextmanager
def with_kway(images: Tensor, labels: Tensor) -> Iterator[Epoch]:
    """The same work through the public API, in the ranks that are there."""
    job = kway.Job(
        model=lenet,
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.SGD, lr=LEARNING_RATE, momentum=MOMENTUM),
        data=(images, labels),
        batch_size=BATCH,
        seed=0,
    )
    with kway.parallel(job) as p:

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
