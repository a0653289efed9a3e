"""Claim: a second GPU never helps a small model.

Trains a LeNet at one global batch on 1, 2, ... devices: with kway, in each step kind that is asked for, and with
``DistributedDataParallel`` by hand, data on the device already. Every run is a process of its own; candidates take
turns. A device of a CPU is one core: otherwise the first one would already have them all.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

WARM = 2


def drawn(options: argparse.Namespace) -> Any:
    """Draw images of the size of Fashion-MNIST's, and their classes."""
    import torch

    generator = torch.Generator().manual_seed(0)
    return torch.randn(options.samples, 1, 28, 28, generator=generator), torch.arange(options.samples) % 10


def by_kway(options: argparse.Namespace) -> list[float]:
    """Return the seconds of each epoch of kway's."""
    import torch

    import kway
    from kway.zoo import get

    job = kway.Job(
        model=partial(get("lenet"), (1, 28, 28), 10),
        loss=torch.nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.SGD, lr=0.05),
        data=drawn(options),
        batch_size=options.batch,
    )
    devices = f"cpu:{options.devices}" if options.kind == "cpu" else int(options.devices)
    strategy = "single" if int(options.devices) == 1 else "data"
    with tempfile.TemporaryDirectory() as out:
        run = kway.train(
            job,
            devices=devices,
            strategy=strategy,
            step_kind=options.way,
            epochs=WARM + options.epochs,
            exactness="loose",
            tune=False,
            out=Path(out) / "run",
            echo=False,
        )
    return [epoch["seconds"] for epoch in run.epochs]


def by_ddp(options: argparse.Namespace) -> list[float]:
    """Return the seconds of each epoch of plain DDP, on this rank of torchrun's."""
    import time

    import torch
    import torch.distributed as dist
    from torch import nn

    from kway.zoo import get

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cpu") if options.kind == "cpu" else torch.device("cuda", rank)
    if options.kind == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if options.kind == "cpu" else "nccl")
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(get("lenet")((1, 28, 28), 10).to(device))
    optimizer, loss = torch.optim.SGD(model.parameters(), lr=0.05), nn.CrossEntropyLoss()
    images, classes = (part.to(device) for part in drawn(options))
    seconds = []
    for _ in range(WARM + options.epochs):
        begun = time.perf_counter()
        for batch in torch.randperm(len(images), device=device).split(options.batch):
            mine = batch.tensor_split(size)[rank]
            optimizer.zero_grad()
            loss(model(images[mine]), classes[mine]).backward()
            optimizer.step()
        if options.kind == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun)
    dist.destroy_process_group()
    return seconds


def one(options: argparse.Namespace, way: str, devices: int) -> list[float]:
    """Run one candidate in processes of its own; return the seconds of its epochs without the first ones."""
    own = [
        __file__,
        "--way",
        way,
        "--devices",
        str(devices),
        "--kind",
        options.kind,
        "--batch",
        str(options.batch),
    ]
    own += ["--samples", str(options.samples), "--epochs", str(options.epochs)]
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(devices)]
        if way == "ddp"
        else []
    )
    environment = os.environ | ({"OMP_NUM_THREADS": "1"} if options.kind == "cpu" else {})
    done = subprocess.run(
        [sys.executable, *launcher, *own], stdout=subprocess.PIPE, text=True, check=True, env=environment
    )
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    return [max(each) for each in zip(*rows, strict=True)][WARM:]


def main() -> int:
    """Run all candidates in turns and print the median epoch of each, with what more devices make of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--way", help=argparse.SUPPRESS)
    parser.add_argument("--kind", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--devices", default="1,2", help="numbers of devices, by commas")
    parser.add_argument("--ways", default="", help="ddp and step kinds of kway, by commas")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--samples", type=int, default=10240)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.way:
        print(json.dumps(by_ddp(options) if options.way == "ddp" else by_kway(options)), flush=True)
        return 0
    usual = "ddp,eager" if options.kind == "cpu" else "ddp,eager,compiled-graph"
    counts = [int(count) for count in options.devices.split(",")]
    candidates = [(way, count) for way in (options.ways or usual).split(",") for count in counts]
    taken: dict[tuple[str, int], list[float]] = {candidate: [] for candidate in candidates}
    for _ in range(options.rounds):
        for candidate in candidates:
            taken[candidate] += one(options, *candidate)
    rows = []
    for way, count in candidates:
        values = taken[way, count]
        median = statistics.median(values)
        first = statistics.median(taken[way, counts[0]])
        rows.append(
            {"way": way, "devices": count, "epoch_s": round(median, 4), "speed_up": round(first / median, 2),
             "spread": round((max(values) - min(values)) / median, 3), "values": [round(v, 4) for v in values]}
        )  # fmt: skip
        print(
            f"{way:16} {count} devices  {median:8.4f} s  {first / median:5.2f} times  spread {rows[-1]['spread']:.1%}"
        )
    if options.out:
        options.out.write_text(json.dumps({"kind": options.kind, "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
