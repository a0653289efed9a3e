"""The seeds' models in plain torch, accuracy after every epoch: is what kway ends at what the recipe gives?

    torchrun --nproc-per-node K plain.py --data DIR [--model M] [--batch B] [--lr R] [--seeds 0,1,2]

Plain ``DistributedDataParallel``, statistics of each GPU, data on the GPU, no partial batch dropped. On one GPU
with ``--batch 1024 --lr 0.4`` ResNet-18 is the same work as four GPUs at level ``math``. LeNet, on one GPU with lr 0.2,
runs without TF32 as kway's.
"""

import argparse
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))


def tensors(options: argparse.Namespace, device: torch.device) -> list[torch.Tensor]:
    """Return images and classes of both parts on the device; a few in a smoke run."""
    from kway.data import sources

    source = sources.load("synthetic") if options.cpu else sources.load("fashion-mnist", options.data)
    found: list[torch.Tensor] = []
    for part in (source.train, source.validation):
        count = 64 if options.cpu else len(part)
        images, classes = zip(*(part[at] for at in range(count)), strict=True)
        found += [
            torch.stack([torch.as_tensor(image) for image in images]).to(device),
            torch.as_tensor([int(value) for value in classes], device=device),
        ]
    return found


@torch.no_grad()
def accuracy(model: nn.Module, images: torch.Tensor, classes: torch.Tensor) -> float:
    """Share of right answers in evaluation mode."""
    model.eval()
    pairs = zip(images.split(1000), classes.split(1000), strict=True)
    right = sum(int((model(x).argmax(1) == y).sum()) for x, y in pairs)
    model.train()
    return right / len(images)


def _rate(options: argparse.Namespace, size: int) -> float:
    return float(options.lr or (0.2 if options.model == "lenet" else 0.1 * size))


def train(
    options: argparse.Namespace, seed: int, data: list[torch.Tensor], device: torch.device
) -> list[float]:
    """Train from the seed's weights; return rank 0's accuracies."""
    from kway.zoo import get

    rank, size = dist.get_rank(), dist.get_world_size()
    images, classes, held, answers = data
    torch.manual_seed(seed)
    model = get(options.model)((1, 28, 28), 10).to(device)
    wrapped = nn.parallel.DistributedDataParallel(model) if size > 1 else model
    optimizer = torch.optim.SGD(wrapped.parameters(), _rate(options, size))
    generator, loss, found = torch.Generator().manual_seed(seed), nn.CrossEntropyLoss(), []
    for _ in range(options.epochs):
        order = torch.randperm(len(images), generator=generator).to(device)
        for batch in order.split(options.batch * size):
            mine = batch.tensor_split(size)[rank]
            optimizer.zero_grad()
            loss(wrapped(images[mine]), classes[mine]).backward()
            optimizer.step()
        found.append(accuracy(model, held, answers))
    return found


def main() -> int:
    """Train once for each seed; rank 0 prints a row each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--model", choices=["lenet", "resnet18"], default="resnet18")
    parser.add_argument("--batch", type=int, default=256, help="samples a GPU")
    parser.add_argument("--lr", type=float, help="default 0.1 times the number of GPUs")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--cpu", action="store_true")
    options = parser.parse_args()
    dist.init_process_group("gloo" if options.cpu else "nccl")
    local = int(os.environ["LOCAL_RANK"])
    device = torch.device("cpu") if options.cpu else torch.device("cuda", local)
    if not options.cpu:
        torch.cuda.set_device(device)
        tf32 = options.model == "resnet18"
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
    data = tensors(options, device)
    for seed in map(int, options.seeds.split(",")):
        found = train(options, seed, data, device)
        if dist.get_rank() == 0:
            size = dist.get_world_size()
            rate = _rate(options, size)
            print(json.dumps({"kind": "plain", "model": options.model, "gpus": size, "seed": seed,
                              "batch": options.batch * size, "lr": rate, "accuracy": found}), flush=True)  # fmt: skip
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
