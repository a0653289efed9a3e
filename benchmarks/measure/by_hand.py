"""The same things timed by hand, in plain torch: nothing of kway is used here."""

import json
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import torch

ROUNDS = 10
QUEUED = 20
PART_S = 240.0


def wait(device: str) -> None:
    """Wait until a device has done all it was given."""
    if device != "cpu":
        torch.cuda.synchronize(device)


def best_product(device: str, dtype: torch.dtype, n: int) -> float:
    """Return FLOP/s of the fastest of ten products of n x n matrices, each timed alone, after three that are not."""
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    took = []
    for number in range(3 + ROUNDS):
        wait(device)
        if device == "cpu":
            begun = time.perf_counter()
            torch.mm(a, b, out=out)
            seconds = time.perf_counter() - begun
        else:
            with torch.cuda.device(device):
                start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                torch.mm(a, b, out=out)
                stop.record()
                stop.synchronize()
            seconds = start.elapsed_time(stop) / 1e3
        if number >= 3:
            took.append(seconds)
    return 2 * n**3 / min(took)


def copied(source: str, target: str, size: int) -> float:
    """Return bytes a second of copies, 20 queued at a time, the median of ten; CPU memory is pinned beside GPUs."""
    pinned = source != target
    ends = [
        torch.ones(size, dtype=torch.uint8, device=device, pin_memory=pinned and device == "cpu")
        for device in (source, target)
    ]
    rates = []
    for number in range(1 + ROUNDS):
        for device in (source, target):
            wait(device)
        begun = time.perf_counter()
        for _ in range(QUEUED):
            ends[1].copy_(ends[0], non_blocking=True)
        for device in (source, target):
            wait(device)
        if number:
            rates.append(QUEUED * size / (time.perf_counter() - begun))
    return median(rates)


def all_reduced(backend: str, ranks: int, size: int) -> float:
    """Return bus bandwidth in B/s of an all-reduce of ``size`` bytes over so many ranks that torchrun starts."""
    script = Path(__file__).with_name("all_reduce.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run(
        [*command, str(script), backend, str(size)],
        stdout=subprocess.PIPE, text=True, timeout=PART_S, check=True,
    )  # fmt: skip
    rows = [line for line in done.stdout.splitlines() if line.startswith("{")]
    seconds = json.loads(rows[-1])["seconds"]
    return 2 * (ranks - 1) / ranks * size / median(seconds)
