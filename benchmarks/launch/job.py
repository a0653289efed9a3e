"""The work that is started: LeNet's first step on the ranks that are there; rank 0 says when it is through with it.

`by-hand` is plain torch with DDP, `kway` the same with `kway.parallel`. The clock is the machine's monotonic one, which
whoever started the command reads as well.
"""

import os
import sys
import time

import torch
from torch import nn

FIRST = "first step at"


def model() -> nn.Module:
    """Make LeNet for images of 28 x 28."""
    return nn.Sequential(
        nn.Conv2d(1, 20, 3), nn.ReLU(), nn.AvgPool2d(2),
        nn.Conv2d(20, 50, 5), nn.ReLU(), nn.AvgPool2d(2),
        nn.Flatten(), nn.Linear(800, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip


def data() -> tuple[torch.Tensor, torch.Tensor]:
    """Draw 2,000 images and their labels."""
    numbers = torch.Generator().manual_seed(0)
    images = torch.rand(2_000, 1, 28, 28, generator=numbers)
    return images, torch.randint(10, (2_000,), generator=numbers)


def by_hand() -> None:
    """Take one step with DDP. Rank and size are torchrun's and kway's, or those of Open MPI."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    for ours, theirs in (("RANK", "OMPI_COMM_WORLD_RANK"), ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE")):
        if ours not in os.environ:
            os.environ[ours] = os.environ[theirs]
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    module = DistributedDataParallel(model())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    images, labels = data()
    mine = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))[:256].tensor_split(size)[
        rank
    ]
    nn.functional.cross_entropy(module(images[mine]), labels[mine]).backward()
    optimizer.step()
    if rank == 0:
        print(FIRST, time.monotonic(), flush=True)
    # A rank of Gloo that leaves early can end the other one's process.
    dist.barrier()
    dist.destroy_process_group()
    # Gloo's threads outlive the group, and abort a process that is taken down while they drop a tensor.
    time.sleep(0.05)


def with_kway() -> None:
    """Take one step of the same job with kway."""
    from functools import partial

    import kway

    sgd = partial(torch.optim.SGD, lr=0.1)
    job = kway.Job(model=model, loss=nn.CrossEntropyLoss(), optimizer=sgd, data=data(), batch_size=256)
    with kway.parallel(job) as p:
        p.step(next(p.batches(0)))
        p.print(FIRST, time.monotonic())


if __name__ == "__main__":
    {"by-hand": by_hand, "kway": with_kway}[sys.argv[1]]()
