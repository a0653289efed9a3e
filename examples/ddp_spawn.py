"""``DistributedDataParallel`` in processes that the script starts itself: by hand with ``spawn``, and kway.

    python examples/ddp_spawn.py

Two ranks, each with a GPU where there are two. By hand the worker has to be a function of the file, the file needs a
guard for ``__main__``, and the weights come back through a file; kway needs none of it.
"""

import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import kway

SIZE, BATCH, EPOCHS, LR = 2, 64, 2, 0.1
GPU = torch.cuda.device_count() >= SIZE
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


def worker(rank: int, folder: Path) -> None:
    """Train on one rank; rank 0 leaves the weights and the seconds of each epoch in ``folder``."""
    device = torch.device("cuda", rank) if GPU else torch.device("cpu")
    torch.set_num_threads(max(1, torch.get_num_threads() // SIZE))
    backend, meeting = "nccl" if GPU else "gloo", f"file://{folder}/meeting"
    dist.init_process_group(backend, init_method=meeting, rank=rank, world_size=SIZE)
    model = nn.parallel.DistributedDataParallel(lenet().to(device))
    optimizer, loss, seconds = torch.optim.SGD(model.parameters(), lr=LR), nn.CrossEntropyLoss(), []
    for _ in range(EPOCHS):
        begun = time.perf_counter()
        for x, y in zip(X.split(BATCH), Y.split(BATCH), strict=True):
            own_x, own_y = x.tensor_split(SIZE)[rank], y.tensor_split(SIZE)[rank]
            optimizer.zero_grad()
            loss(model(own_x.to(device)), own_y.to(device)).backward()
            optimizer.step()
        dist.barrier()
        seconds.append(time.perf_counter() - begun)
    if rank == 0:
        torch.save((model.module.cpu().state_dict(), seconds), folder / "result.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        torch.multiprocessing.spawn(worker, (Path(name),), nprocs=SIZE)
        state, hand = torch.load(Path(name) / "result.pt")
    sgd, cross_entropy = partial(torch.optim.SGD, lr=LR), nn.CrossEntropyLoss()
    job = kway.Job(lenet(), cross_entropy, sgd, data=(X, Y), batch_size=BATCH, shuffle=False)
    run = kway.train(job, devices=SIZE if GPU else f"cpu:{SIZE}", strategy="data", epochs=EPOCHS, tune=False)
    print(f"DDP by spawn, {SIZE} ranks ({'cuda' if GPU else 'cpu'})   seconds of each epoch")
    print("by hand  " + "  ".join(f"{value:8.3f}" for value in hand))
    print("kway     " + "  ".join(f"{row['seconds']:8.3f}" for row in run.epochs))
    difference = max(float((state[n] - v.cpu()).abs().max()) for n, v in run.model.state_dict().items())
    print(f"largest difference of a weight: {difference:.1e}")
    sys.exit(difference > 1e-5)
