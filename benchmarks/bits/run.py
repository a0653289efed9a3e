"""Measure what each level of exactness costs, in the ranks that are there: plain python, or torchrun.

One JSON line a row. Without a GPU, or with --cpu, it runs on CPU ranks.
"""

import argparse
import datetime
import json
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from candidates import SHAPES, Candidate, Setting, job_of
from rounds import measure

import kway
from kway.comm.group import Group
from kway.devices.cuda import fix_workspace
from kway.launch.joining import join
from kway.launch.torchrun import from_environment
from kway.step.deterministic import bits_hold_within
from kway.world import World

ONE_DEVICE_SHARDS = (4, 8)


@dataclass(frozen=True)
class Row:
    """Candidates on one layout; the first is what the others are compared with. ``batch``: global samples."""

    title: str
    model: str
    batch: int
    layout: dict[str, int]
    settings: list[Setting]


def processor() -> str:
    """Name the processor's model."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def here(cpu: bool) -> World:
    """Return this process's place, a member of the ranks that torchrun started or alone."""
    kind = "cpu" if cpu or not torch.cuda.is_available() else "cuda"
    world = from_environment(device=kind)
    if world is None:
        return World(device="cpu" if kind == "cpu" else "cuda:0")
    join(world)
    return world


def usable_cores() -> int:
    """Count the processors that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def rows(model: str, a_device: int, world: World) -> Iterator[Row]:
    """Yield the comparisons for a model: spread over all ranks, then on one device.

    The batch of one device is ``a_device`` samples; the same global batch on one device follows, where there
    are several, to see that both computed the same bits.
    """
    ranks, cpu = world.size, world.device == "cpu"
    share = max(1, usable_cores() // ranks) if cpu else 1
    alone = usable_cores() if cpu else 1

    def levels(threads: int, shards: list[int], math: bool) -> list[Setting]:
        # At level bits a shard is computed by one thread on CPUs.
        bits = [Setting(f"bits, {count} shards", "bits", count, True, 1) for count in shards]
        more = [Setting("math", "math", 1, False, threads)] if math else []
        return [
            Setting("loose, deterministic", "loose", 1, True, threads),
            Setting("loose", "loose", 1, False, threads),
            *more,
            *bits,
        ]

    if ranks > 1:
        counts = sorted({ranks, 8}) if ranks < 8 else [ranks]
        both = ranks * a_device
        yield Row(f"data={ranks}", model, both, {"data": ranks}, levels(share, counts, True))
        yield Row("single, the same batch", model, both, {}, levels(alone, [ranks], False))
    yield Row("single", model, a_device, {}, levels(alone, list(ONE_DEVICE_SHARDS), False))


@contextmanager
def opened(row: Row, precision: str, world: World) -> Iterator[list[Candidate]]:
    """Open all candidates of a row on this rank."""
    job = job_of(row.model, row.batch, precision)
    candidates: list[Candidate] = []
    try:
        candidates.extend(Candidate(job, setting, row.layout, world) for setting in row.settings)
        yield candidates
    finally:
        for candidate in reversed(candidates):
            candidate.close()
        if world.device != "cpu":
            torch.cuda.empty_cache()


def run(row: Row, options: argparse.Namespace, world: World) -> dict[str, Any] | None:
    """Measure a row. What runs on one device runs on rank 0, while the others wait: ``None`` there."""
    spread_out = bool(row.layout)
    group = Group(world.rank, world.size) if spread_out else Group()
    result = None
    if spread_out or world.is_main:
        place = world if spread_out else World(device=world.device)
        with opened(row, options.precision, place) as candidates:
            result = {
                "row": row.title,
                "model": row.model,
                "global_batch": row.batch,
                "precision": options.precision,
                **measure(candidates, group, options.max_spread, options.max_seconds),
            }
    Group(world.rank, world.size).barrier()
    return result


def same_bits(results: list[dict[str, Any]], ranks: int) -> bool:
    """Whether each model got the same weights on all ranks and on one device, of the same batch and shards."""
    name = f"bits, {ranks} shards"
    prints: dict[str, set[str]] = {}
    for result in results:
        if result["row"] in (f"data={ranks}", "single, the same batch"):
            prints.setdefault(result["model"], set()).add(result["candidates"][name]["weights_sha256"])
    return all(len(found) == 1 for found in prints.values())


def short(result: dict[str, Any]) -> dict[str, Any]:
    """Leave out what a reader of the terminal does not need."""
    left_out = ("step_s_of_rounds", "weights_sha256")
    brief = {
        name: {key: round(value, 5) for key, value in values.items() if key not in left_out}
        for name, values in result["candidates"].items()
    }
    return {**result, "candidates": brief}


def keep(path: Path, world: World, results: list[dict[str, Any]], equal: bool) -> None:
    """Write the results into ``path``, beside those of other kinds of devices that it holds."""
    kind = f"{torch.device(world.device).type}:{world.size}"
    within = bits_hold_within(torch.device(world.device), world.size)
    entry = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "processor": processor(),
        "usable_cores": usable_cores(),
        "device": within["device"],
        "versions": {
            "kway": kway.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "step_s": "median over rounds of the slowest rank's seconds a step; batches lie on the device",
        "ratio": "median over rounds of the time by the baseline's in the same round",
        "spread": "(max - min) / median over the medians of five consecutive blocks of rounds",
        "bits_are_those_of_one_device": equal,
        "rows": results,
    }
    held = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**held, kind: entry}, indent=2) + "\n")


def main() -> int:
    """Measure all rows. Exit code 1 where the bits of several devices are not those of one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cpu", action="store_true", help="CPU ranks, though there are GPUs")
    parser.add_argument(
        "--model", choices=SHAPES, action="append", help="default: resnet18 (CPU: mlp, lenet)"
    )
    parser.add_argument("--batch", type=int, default=256, help="samples a device (default 256)")
    parser.add_argument("--precision", help="default: tf32 (CPU: fp32)")
    parser.add_argument("--max-spread", type=float, default=0.02, help="a ratio has settled (default 0.02)")
    parser.add_argument("--max-seconds", type=float, default=24, help="at most this long a row (default 24)")
    parser.add_argument("--out", type=Path, help="also keep everything in this JSON file")
    options = parser.parse_args()
    world = here(options.cpu)
    cpu = world.device == "cpu"
    options.precision = options.precision or ("fp32" if cpu else "tf32")
    if not cpu:
        fix_workspace()
    results = []
    for model in options.model or (["mlp", "lenet"] if cpu else ["resnet18"]):
        for row in rows(model, options.batch, world):
            result = run(row, options, world)
            if result is not None and world.is_main:
                print(json.dumps(short(result)), flush=True)
                results.append(result)
    if not world.is_main:
        return 0
    equal = same_bits(results, world.size)
    if world.size > 1:
        print(
            json.dumps({"row": "same bits", "on": f"1 and {world.size} devices", "equal": equal}), flush=True
        )
    if options.out is not None:
        keep(options.out, world, results, equal)
    return int(not equal)


if __name__ == "__main__":
    sys.exit(main())
