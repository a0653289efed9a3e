"""Data parallelism from scratch: copies of the parameters, a scattered batch, an all-reduce of one's own; and kway.

    python examples/all_reduce.py

Takes all GPUs where there are two or more, else two copies on the CPU, one after the other.
"""

import sys
import time
from functools import partial

import torch
from torch import nn

import kway

GPUS = torch.cuda.device_count()
DEVICES = [torch.device("cuda", i) for i in range(GPUS)] if GPUS > 1 else [torch.device("cpu")] * 2
BATCH, EPOCHS, LR = 64, 2, 0.1
torch.backends.cudnn.allow_tf32 = False  # as kway's fp32: else GPUs round products to ten bits

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


def all_reduce(tensors: list[torch.Tensor]) -> None:
    """Give each device the sum: all onto the first, and from there to the others."""
    for other in tensors[1:]:
        tensors[0].add_(other.to(tensors[0].device))
    for other in tensors[1:]:
        other.copy_(tensors[0])


def step(models: list[nn.Module], x: torch.Tensor, y: torch.Tensor) -> None:
    """Take one step of SGD on all copies: the gradient is the mean over the whole batch."""
    shares = zip(models, x.tensor_split(len(models)), y.tensor_split(len(models)), DEVICES, strict=True)
    for model, own_x, own_y, device in shares:
        output = model(own_x.to(device))
        nn.functional.cross_entropy(output, own_y.to(device), reduction="sum").backward()
    with torch.no_grad():
        for copies in zip(*(model.parameters() for model in models), strict=True):
            all_reduce([parameter.grad for parameter in copies])
            for parameter in copies:
                parameter.sub_(LR * parameter.grad / len(x))
                parameter.grad = None


models, hand = [lenet().to(device) for device in DEVICES], []
for _ in range(EPOCHS):
    begun = time.perf_counter()
    for x, y in zip(X.split(BATCH), Y.split(BATCH), strict=True):
        step(models, x, y)
    for device in DEVICES if GPUS > 1 else ():
        torch.cuda.synchronize(device)
    hand.append(time.perf_counter() - begun)
job = kway.Job(
    model=lenet(), loss=nn.CrossEntropyLoss(), optimizer=partial(torch.optim.SGD, lr=LR),
    data=(X, Y), batch_size=BATCH, shuffle=False,
)  # fmt: skip
run = kway.train(job, devices=GPUS if GPUS > 1 else "cpu:2", strategy="data", epochs=EPOCHS, tune=False)

print(f"all-reduce over {len(DEVICES)} devices ({DEVICES[0].type})   seconds of each epoch")
print("by hand  " + "  ".join(f"{value:8.3f}" for value in hand))
print("kway     " + "  ".join(f"{row['seconds']:8.3f}" for row in run.epochs))
pairs = zip(models[0].cpu().state_dict().values(), run.model.cpu().state_dict().values(), strict=True)
difference = max(float((a - b).abs().max()) for a, b in pairs)
print(f"largest difference of a weight: {difference:.1e}")
sys.exit(difference > 1e-5)
