"""How close does tuning come to the best of everything that could be chosen, and in how many seconds?

One device. First ``kway.tune`` with its budget, from an empty cache; then every combination of what it may choose, each
as a trial of the same kind; then the best of them, the choice and the step as it is in turns. Exit code 1 where the
choice is slower than the step as it is; on a GPU also where it is over 5% slower than the best, or tuning took over a
tenth more than its time, which of a CPU are shown and not judged.
"""

import argparse
import dataclasses
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import nn

import kway
from kway.comm.group import Group
from kway.comm.meeting import meeting
from kway.jobs.place import Place, place, with_threads
from kway.launch.status import Status
from kway.step.build import build
from kway.step.kinds import KINDS
from kway.training.surroundings import gpu_name, machine, versions
from kway.tuning.run import COMPARED
from kway.tuning.search import Reading
from kway.tuning.trial import Trials
from kway.world import World
from kway.zoo import get

WITHIN, LATE, ROUNDS = 1.05, 1.1, 5


def main(words: list[str] | None = None) -> int:
    """Measure, print the table, write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=["lenet", "resnet18", "gpt-1m"])
    parser.add_argument("--tune-seconds", type=float, default=60.0)
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--batch-size", type=int, help="256 for images, 16 for text")
    parser.add_argument("--samples", type=int, default=20_000, help="drawn samples to step over")
    parser.add_argument("--out", type=Path, required=True, help="the result, as JSON")
    parser.add_argument(
        "--kinds",
        type=kinds_of,
        default=[*KINDS],
        help="step kinds of the grid, such as graph,compiled-graph: all unless named",
    )
    parser.add_argument("--smoke", action="store_true", help="tiny: does it run at all")
    options = parser.parse_args(words)
    where = place(1, exactness="loose")
    device = torch.device(where.plan.device_set[0]).type
    choices = grid(device, options.model, options.smoke, options.kinds)
    if not choices:
        kinds, test = ",".join(options.kinds), " in a smoke test" if options.smoke else ""
        parser.error(f"argument --kinds: nothing to measure with {kinds} on {device}{test}")
    with tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache
        result = measured(options, where, choices)
    options.out.write_text(json.dumps(result, indent=2) + "\n")
    print(
        json.dumps(
            {name: result[name] for name in ("choice", "best", "ratios", "seconds", "verdict")}, indent=2
        )
    )
    return int(bool(result["verdict"]))


def measured(options: argparse.Namespace, where: Place, choices: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the whole result. ``where``: the device; ``choices``: the grid."""
    job = job_of(options)
    begun = time.perf_counter()
    record = kway.tune(job, devices=1, exactness="loose", seconds=options.tune_seconds, say=print)
    seconds = time.perf_counter() - begun
    world = World(device=where.plan.device_set[0], threads=where.threads)
    with with_threads(where.threads), meeting(Group(0, 1)) as met:
        compared = COMPARED[torch.device(world.device).type]
        trials = Trials(world, Group(0, 1), met, job, where.plan, build(job), Status(), compared)
        trials.prepare(lambda step_s, rest_s: True)
        rows = []
        for choice in choices:
            reading = trials.measure(choice)
            rows.append({"choice": choice, **dataclasses.asdict(reading)})
            print(f"{step_ms(reading):>9}  {choice}  {reading.refused or reading.difference}", flush=True)
        # What does not agree with the step as it is could not be chosen.
        able = [row for row in rows if row["step_s"] and not row["difference"]]
        best = min(able, key=lambda row: statistics.median(row["step_s"]))["choice"]
        turns: dict[str, list[float]] = {"best": [], "choice": [], "plain": []}
        for _ in range(1 if options.smoke else ROUNDS):
            for name, choice in (("best", best), ("choice", record.choice), ("plain", {})):
                turns[name].append(trials.measure(choice).median_s)
    over = [a / b for a, b in zip(turns["choice"], turns["best"], strict=True)]
    gain = [a / b for a, b in zip(turns["choice"], turns["plain"], strict=True)]
    ratios = {
        "choice over best": [statistics.median(over), min(over), max(over)],
        "choice over plain": [statistics.median(gain), min(gain), max(gain)],
    }
    late = seconds > LATE * options.tune_seconds
    device = torch.device(world.device)
    verdict = judged(device.type, statistics.median(over), statistics.median(gain), record.choice != {}, late)
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine([gpu_name(device)], threads=where.threads),
        "versions": versions(),
        "model": options.model,
        "precision": options.precision,
        "kinds": options.kinds,
        "batch_size": job.batch_size,
        "tune_seconds": options.tune_seconds,
        "seconds": seconds,
        "choice": dict(record.choice),
        "best": best,
        "ratios": ratios,
        "turns_step_s": turns,
        "tuning": record.to_dict(),
        "grid": rows,
        "verdict": verdict,
    }


def judged(device: str, over: float, gain: float, chosen: bool, late: bool) -> str:
    """Return which bars were missed on a type of device, or ``""``.

    ``over``: the choice's time over the best's, ``gain``: over that of the step as it is; ``chosen``: whether anything
    was; ``late``: whether tuning took too long. On a CPU only a choice that is slower than none is a fault.
    """
    gpu = device == "cuda"
    missed = (
        ("over 5% slower than the best", gpu and over > WITHIN),
        ("slower than the step as it is", chosen and gain > 1),
        ("tuning took too long", gpu and late),
    )
    return "; ".join(text for text, bad in missed if bad)


def job_of(options: argparse.Namespace) -> kway.Job:
    """Return the job: an example model over drawn samples, in batches of ``--batch-size``, 256 of images (64 in a smoke
    test) and 16 of text unless named.
    """
    drawn = torch.Generator().manual_seed(0)
    if options.model.startswith("gpt"):
        rows = torch.randint(256, (256 if options.smoke else 2048, 129), generator=drawn)
        model: Any = partial(get(options.model), (128,), 256)
        data, batch = (rows[:, :-1], rows[:, 1:]), 16
        optimizer: Any = partial(torch.optim.AdamW, lr=1e-3)
    else:
        count = 512 if options.smoke else options.samples
        images = torch.rand(count, 1, 28, 28, generator=drawn)
        model, batch = partial(get(options.model), (1, 28, 28), 10), 64 if options.smoke else 256
        data = images, torch.randint(10, (count,), generator=drawn)
        optimizer = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    return kway.Job(
        model=model,
        loss=nn.CrossEntropyLoss(),
        optimizer=optimizer,
        data=data,
        batch_size=batch if options.batch_size is None else options.batch_size,
        precision=options.precision,
        name=options.model,
    )


def kinds_of(text: str) -> list[str]:
    """Return step kinds that stand with commas between them. Raises ``ArgumentTypeError`` for what is none."""
    kinds = text.split(",")
    unknown = [repr(kind) for kind in kinds if kind not in KINDS]
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}; there are {', '.join(KINDS)}")
    return kinds


def grid(device: str, model: str, smoke: bool, only: Sequence[str]) -> list[dict[str, Any]]:
    """List every combination of kind (those of ``only`` that run there), memory format, optimizer form and cuDNN's or
    the threads' choice.
    """
    cuda = device == "cuda"
    kinds = [
        name
        for name, kind in KINDS.items()
        if name in only and (kind.needs is None or cuda) and not (smoke and kind.compiles)
    ]
    formats = [None, "channels_last"] if not model.startswith("gpt") else [None]
    tuned = [None, True] if cuda and len(formats) > 1 else [None]
    threads = [None, 1] if not cuda else [None]
    found = []
    for kind, laid, form, timed, count in product(kinds, formats, [None, "fused"], tuned, threads):
        named = {
            "step_kind": kind,
            "memory_format": laid,
            "optimizer": form,
            "autotune": timed,
            "threads": count,
        }
        found.append({name: value for name, value in named.items() if value is not None})
    return found


def step_ms(reading: Reading) -> str:
    """Say a reading's step in milliseconds."""
    return f"{reading.median_s * 1e3:.3f} ms" if reading.step_s else "-"


if __name__ == "__main__":
    sys.exit(main())
