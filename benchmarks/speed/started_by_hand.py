"""The start that kway's is compared with: LeNet on k ranks by hand, up to its first step.

Started by torchrun, or by itself for one rank. Rank 0 prints a line when all is ready, and takes a step.
"""

import argparse
import gzip
import os
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

READY = "ready"


def read(file: Path, header: int) -> torch.Tensor:
    """Read an IDX file of bytes."""
    with gzip.open(file) as stream:
        return torch.from_numpy(np.frombuffer(stream.read(), np.uint8, offset=header).copy())


def main() -> None:
    """Read the data, make the model, join the ranks, say so, and take one step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help="root of the data sets; without, images are drawn")
    parser.add_argument("--cuda", action="store_true")
    options = parser.parse_args()
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    device = torch.device("cuda", rank) if options.cuda else torch.device("cpu")
    if options.cuda:
        torch.cuda.set_device(device)
    if size > 1:
        dist.init_process_group("nccl" if options.cuda else "gloo")
    if options.data is not None:
        folder = options.data / "fashion-mnist"
        images = read(folder / "train-images-idx3-ubyte.gz", 16).view(-1, 1, 28, 28)
        labels = read(folder / "train-labels-idx1-ubyte.gz", 8)
        # As kway does: the images to validate on are there before training begins.
        held = [
            read(folder / f"t10k-{name}-ubyte.gz", skip)
            for name, skip in (("images-idx3", 16), ("labels-idx1", 8))
        ]
        assert held[0].numel() == 28 * 28 * len(held[1])
    else:
        images = torch.randint(256, (2_000, 1, 28, 28), dtype=torch.uint8)
        labels = torch.randint(10, (2_000,), dtype=torch.uint8)
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(
        nn.Conv2d(1, 20, 3), nn.ReLU(), nn.AvgPool2d(2),
        nn.Conv2d(20, 50, 5), nn.ReLU(), nn.AvgPool2d(2),
        nn.Flatten(), nn.Linear(800, 128), nn.ReLU(), nn.Linear(128, 10),
    ).to(device)  # fmt: skip
    if size > 1:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    mine = order[:256].tensor_split(size)[rank]
    if rank == 0:
        print(READY, flush=True)
    x = images[mine].to(device).float().div(255)
    nn.functional.cross_entropy(model(x), labels[mine].to(device).long()).backward()
    optimizer.step()
    if size > 1:
        # A rank of Gloo that leaves early can end the other one's process.
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
