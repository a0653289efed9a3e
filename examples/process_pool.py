"""Independent jobs in a pool of processes: ``multiprocessing`` by hand, and ``kway.map``.

    python examples/process_pool.py

Four learning rates are tried by plain torch, two at a time. ``kway.map`` gives each process a device of its own: a GPU
where there are two, else a part of the cores.
"""

import multiprocessing
import sys
import time

import torch
from torch import nn

import kway

GPUS = torch.cuda.device_count()
RATES = (0.01, 0.03, 0.1, 0.3)

rng = torch.Generator().manual_seed(0)
X = torch.rand(512, 1, 28, 28, generator=rng)
Y = (X[:, 0, :14].mean((1, 2)) > X[:, 0, 14:].mean((1, 2))).long()


def tried(rate: float) -> float:
    """Train a small network at one learning rate, in one thread of a CPU; return its last loss."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 2))
    optimizer, loss = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9), nn.CrossEntropyLoss()
    for _ in range(20):
        for x, y in zip(X.split(64), Y.split(64), strict=True):
            optimizer.zero_grad()
            found = loss(model(x), y)
            found.backward()
            optimizer.step()
    return found.item()


def by_hand() -> list[float]:
    """Return the last loss at each rate. Forked from here, a pool would inherit torch's threads in any state."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch"])
    with context.Pool(2) as pool:
        return pool.map(tried, RATES, chunksize=1)


if __name__ == "__main__":
    begun = time.perf_counter()
    hand = by_hand()
    between = time.perf_counter()
    found = kway.map(tried, RATES, devices=2 if GPUS > 1 else "cpu:2")
    ended = time.perf_counter()
    print("learning rate                       " + "  ".join(f"{rate:8}" for rate in RATES) + "   seconds")
    print("by hand                  last loss  " + "  ".join(f"{x:8.5f}" for x in hand), end="")
    print(f"  {between - begun:8.3f}")
    print("kway                     last loss  " + "  ".join(f"{x:8.5f}" for x in found), end="")
    print(f"  {ended - between:8.3f}")
    difference = max(abs(a - b) for a, b in zip(hand, found, strict=True))
    print(f"largest difference of a loss: {difference:.1e}")
    sys.exit(difference > 1e-6)
