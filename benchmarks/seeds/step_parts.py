"""The parts of a step, in one process and in several: why threads lose, or where they do not.

Runs the same global batch as one device, as ``threads=k``, as ``data=k`` and as plain DDP under torchrun, in turn and
several times over; prints the median of each part, and writes all values. Parts, in milliseconds of rank 0:

scatter   reading this rank's share and bringing it to its device
forward, backward
reduce    summing gradients over the ranks, the wait for the slowest included
update    clipping and the optimizer
rest      of the step: bookkeeping, and of threads the wait for each other before and after

Of DDP, backward holds the reduction. ``replicate`` is the copy of the model for one further device: kway makes it once
a run, ``nn.DataParallel`` in every step (measured on GPUs, where it works at all).
"""

import argparse
import copy
import json
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from parts import columns

WARM = 5
NAMES = ("scatter", "forward", "backward", "reduce", "update", "rest", "step")


def synchronised(device: Any) -> float:
    """Return the time, once a GPU has done what it was given."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def timed(row: dict[str, float], name: str, function: Any, device: Any) -> Any:
    """Return ``function`` with the time it takes added to ``row``."""

    def call(*args: Any, **kwargs: Any) -> Any:
        begun = synchronised(device)
        try:
            return function(*args, **kwargs)
        finally:
            row[name] = row.get(name, 0.0) + synchronised(device) - begun

    return call


def kway_steps(context: Any, options: argparse.Namespace, layout: dict[str, int]) -> list[dict[str, float]]:
    """Take steps on one rank; return the parts of each after the first few."""
    from kway.data.parts import take_apart
    from kway.strategies.engine import Engine

    job = job_of(options)
    parts = take_apart(job.data, batch_size=options.batch, seed=0, shuffle=True)
    engine = Engine(job, job.model(), layout, context.world, "math", options.batch, status=context.status)
    device, core, rows = engine.device, engine._step, []
    originals = core.forward, core.backward, core.update
    reducer = engine.part.reducer
    reduce = None if reducer is None else reducer.reduce
    try:
        for step in range(WARM + options.steps):
            row: dict[str, float] = {}
            core.forward, core.backward, core.update = (
                timed(row, name, function, device)
                for name, function in zip(("forward", "backward", "update"), originals, strict=True)
            )
            if reducer is not None:
                reducer.reduce = timed(row, "reduce", reduce, device)
            engine.mesh.world.barrier()
            begun = synchronised(device)
            share = engine.cut(parts, parts.order.batch(0, step % parts.order.steps(0)), 0, step)
            row["scatter"] = synchronised(device) - begun
            engine.step(share, step)
            row["step"] = synchronised(device) - begun
            row["rest"] = 2 * row["step"] - sum(row.values())
            rows.append(row)
    finally:
        engine.close()
    return rows[WARM:]


def ddp_steps(options: argparse.Namespace) -> None:
    """Take the same steps in plain torch, under torchrun; rank 0 prints the parts of each."""
    import torch
    import torch.distributed as dist
    from torch import nn

    on_cpu = options.devices.startswith("cpu")
    dist.init_process_group("gloo" if on_cpu else "nccl")
    rank, size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cpu") if on_cpu else torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    if not on_cpu:
        torch.cuda.set_device(device)
    job = job_of(options)
    model = nn.parallel.DistributedDataParallel(job.model().to(device))
    optimizer, loss = job.optimizer(model.parameters()), nn.CrossEntropyLoss()
    images, classes = job.data
    rows = []
    for step in range(WARM + options.steps):
        row: dict[str, float] = {}
        dist.barrier()
        begun = synchronised(device)
        chosen = (
            torch.arange(options.batch)
            .add(step * options.batch)
            .remainder(len(images))
            .tensor_split(size)[rank]
        )
        x, y = images[chosen].to(device), classes[chosen].to(device)
        row["scatter"] = synchronised(device) - begun
        optimizer.zero_grad()
        value = timed(row, "forward", lambda x=x, y=y: loss(model(x), y), device)()
        timed(row, "backward", value.backward, device)()
        timed(row, "update", optimizer.step, device)()
        row["step"] = synchronised(device) - begun
        row["rest"] = 2 * row["step"] - sum(row.values())
        rows.append(row)
    if rank == 0:
        print(json.dumps(rows[WARM:]))
    dist.destroy_process_group()


def job_of(options: argparse.Namespace) -> Any:
    """Make the job: images that are drawn, as large as Fashion-MNIST's."""
    import torch
    from torch import nn

    import kway
    from kway.zoo import get

    generator = torch.Generator().manual_seed(0)
    images = torch.randn(4 * options.batch, 1, 28, 28, generator=generator)
    return kway.Job(
        model=partial(get(options.model), (1, 28, 28), 10),
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.SGD, lr=0.01),
        data=(images, torch.arange(len(images)) % 10),
        batch_size=options.batch,
    )


def candidate(options: argparse.Namespace, name: str) -> list[dict[str, float]]:
    """Run one candidate in its own way; return rank 0's parts of each step."""
    from kway.jobs.place import place

    if name != "ddp":
        devices = options.devices if name != "single" else first(options.devices)
        where = place(devices, name)
        return list(where.run(kway_steps, options, where.plan.layout)[0])
    count = str(place(options.devices, "data").plan.devices)
    words = [
        f"--{key}={value}"
        for key, value in vars(options).items()
        if key in ("devices", "model", "batch", "steps")
    ]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    found = subprocess.run(
        [*command, __file__, "--role=ddp", *words],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": str(place(options.devices, "data").threads)},
    )
    if found.returncode:
        raise SystemExit(found.stderr)
    return list(json.loads(found.stdout.splitlines()[-1]))


def first(devices: str) -> str:
    """Name the first device of a set."""
    return "cpu:1" if devices.startswith("cpu") else devices.split(",", maxsplit=1)[0]


def replicating(options: argparse.Namespace) -> dict[str, float | None]:
    """Time a copy of the model, and what ``nn.DataParallel`` does in each step (milliseconds)."""
    import torch

    device = torch.device(first(options.devices).replace("cpu:1", "cpu"))
    model = job_of(options).model().to(device)
    row: dict[str, float] = {}
    copies = []
    for _ in range(10):
        row.clear()
        timed(row, "copy", lambda: copy.deepcopy(model), device)()
        copies.append(1e3 * row["copy"])
    each = []
    if device.type == "cuda":
        devices = [int(part) for part in options.devices.removeprefix("cuda:").split(",")]
        for _ in range(10):
            row.clear()
            timed(row, "each", lambda: torch.nn.parallel.replicate(model, devices), device)()
            each.append(1e3 * row["each"])
    return {"once_a_run_ms": median(copies), "data_parallel_each_step_ms": median(each) if each else None}


def main() -> int:
    """Measure all candidates in turn, or be one rank of DDP."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", default="cpu:2")
    parser.add_argument("--model", default="lenet")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--role", default="")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.role == "ddp":
        ddp_steps(options)
        return 0
    found: dict[str, list[list[dict[str, float]]]] = {}
    for _ in range(options.rounds):
        for name in ("single", "threads", "data", "ddp"):
            found.setdefault(name, []).append(candidate(options, name))
    medians = {
        name: [{part: 1e3 * median(row.get(part, 0.0) for row in rows) for part in NAMES} for rows in rounds]
        for name, rounds in found.items()
    }
    lines = [["ms, median (least to most of rounds)", *NAMES]]
    for name, rounds in medians.items():
        cells = [[row[part] for row in rounds] for part in NAMES]
        lines.append([name, *(f"{median(c):.2f}" for c in cells[:-1]),
                      f"{median(cells[-1]):.2f} ({min(cells[-1]):.2f} to {max(cells[-1]):.2f})"])  # fmt: skip
    replicate = replicating(options)
    print(columns(lines))
    print(f"replicate: {replicate}")
    if options.out:
        given = {key: str(value) for key, value in vars(options).items() if key not in ("role", "out")}
        options.out.write_text(
            json.dumps({**given, "replicate": replicate, "rounds": medians}, indent=1) + "\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
