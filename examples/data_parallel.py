"""One process over several devices: ``nn.DataParallel`` by hand, and kway's strategy ``threads``.

    python examples/data_parallel.py

Takes all GPUs where there are two or more. On a CPU ``nn.DataParallel`` does no more than call the model, while kway
has two replicas that share the cores. The model has no batch normalisation, which ``nn.DataParallel`` would compute by
device and kway over the whole batch.
"""

import copy
import sys
import time
from functools import partial

import torch
from torch import nn

import kway

GPUS = torch.cuda.device_count()
DEVICE, COUNT = ("cuda:0", GPUS) if GPUS > 1 else ("cpu", 2)
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
    """Train ``model``; return the seconds of each epoch."""
    parallel = nn.DataParallel(model.to(DEVICE))
    optimizer, loss = torch.optim.SGD(model.parameters(), lr=LR), nn.CrossEntropyLoss()
    seconds = []
    for _ in range(EPOCHS):
        begun = time.perf_counter()
        for x, y in zip(X.split(BATCH), Y.split(BATCH), strict=True):
            optimizer.zero_grad()
            loss(parallel(x.to(DEVICE)), y.to(DEVICE)).backward()
            optimizer.step()
        if GPUS:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun)
    return seconds


first = lenet()
second = copy.deepcopy(first)
hand = by_hand(first)
job = kway.Job(
    model=second, loss=nn.CrossEntropyLoss(), optimizer=partial(torch.optim.SGD, lr=LR),
    data=(X, Y), batch_size=BATCH, shuffle=False,
)  # fmt: skip
devices = COUNT if GPUS > 1 else f"cpu:{COUNT}"
run = kway.train(job, devices=devices, strategy="threads", epochs=EPOCHS)

print(f"one process, {COUNT} devices ({DEVICE})   seconds of each epoch")
print("by hand  " + "  ".join(f"{value:8.3f}" for value in hand))
print("kway     " + "  ".join(f"{row['seconds']:8.3f}" for row in run.epochs))
pairs = zip(first.cpu().state_dict().values(), run.model.cpu().state_dict().values(), strict=True)
difference = max(float((a - b).abs().max()) for a, b in pairs)
print(f"largest difference of a weight: {difference:.1e}")
sys.exit(difference > 1e-5)
