"""``DistributedDataParallel`` in ranks that a launcher started: by hand, and kway in the same ranks.

    torchrun --nproc-per-node 2 examples/ddp_launcher.py

Each rank runs all of this file. It has a GPU of its own where there are as many as ranks.
"""

import copy
import os
import sys
import time
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

import kway

if "RANK" not in os.environ:
    sys.exit("start it with a launcher: torchrun --nproc-per-node 2 examples/ddp_launcher.py")
RANK, SIZE, LOCAL = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
GPU = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
DEVICE = torch.device("cuda", LOCAL) if GPU else torch.device("cpu")
BATCH, EPOCHS, LR = 64, 2, 0.1
# As kway's fp32 does: else GPUs round products to ten bits.
torch.backends.cudnn.allow_tf32 = False

rng = torch.Generator().manual_seed(0)
X = torch.rand(512, 1, 28, 28, generator=rng)
Y = (X[:, 0, :14].mean((1, 2)) > X[:, 0, 14:].mean((1, 2))).long()


def lenet() -> nn.Module:
    """Make a small LeNet, the same each time."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 5), nn.ReLU(), nn.AvgPool2d(2),
        nn.Conv2d(8, 16, 5), nn.ReLU(), nn.AvgPool2d(2),
        nn.Flatten(), nn.Linear(256, 32), nn.ReLU(), nn.Linear(32, 2),
    )  # fmt: skip


def by_hand(model: nn.Module) -> list[float]:
    """Train ``model``; return the seconds of each epoch. DDP averages over ranks: their shares must be equal."""
    parallel = nn.parallel.DistributedDataParallel(model.to(DEVICE))
    optimizer, loss = torch.optim.SGD(model.parameters(), lr=LR), nn.CrossEntropyLoss()
    seconds = []
    for _ in range(EPOCHS):
        begun = time.perf_counter()
        for x, y in zip(X.split(BATCH), Y.split(BATCH), strict=True):
            own_x, own_y = x.tensor_split(SIZE)[RANK], y.tensor_split(SIZE)[RANK]
            optimizer.zero_grad()
            loss(parallel(own_x.to(DEVICE)), own_y.to(DEVICE)).backward()
            optimizer.step()
        dist.barrier()
        seconds.append(time.perf_counter() - begun)
    return seconds


if GPU:
    torch.cuda.set_device(DEVICE)
dist.init_process_group("nccl" if GPU else "gloo")
first = lenet()
job = kway.Job(
    model=copy.deepcopy(first), loss=nn.CrossEntropyLoss(), optimizer=partial(torch.optim.SGD, lr=LR),
    data=(X, Y), batch_size=BATCH, shuffle=False,
)  # fmt: skip
hand = by_hand(first)
run = kway.train(job, devices="auto" if GPU else f"cpu:{SIZE}", epochs=EPOCHS, tune=False)
pairs = zip(first.cpu().state_dict().values(), run.model.cpu().state_dict().values(), strict=True)
difference = max(float((a - b).abs().max()) for a, b in pairs)
if RANK == 0:
    print(f"DDP by launcher, {SIZE} ranks ({DEVICE.type})   seconds of each epoch")
    print("by hand  " + "  ".join(f"{value:8.3f}" for value in hand))
    print("kway     " + "  ".join(f"{row['seconds']:8.3f}" for row in run.epochs))
    print(f"largest difference of a weight: {difference:.1e}")
dist.destroy_process_group()
sys.exit(difference > 1e-5)
