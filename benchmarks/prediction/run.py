"""How far are predictions of ``kway plan`` from what runs take, and is the order right?

For each work in turns: plan first, then every candidate by runs of its own, in turns, three times
(``kway.plan(check=True)``). On GPUs also the peak of memory beside the allocator's. Exit code 1 where a bar is missed.
"""

import argparse
import gc
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from torch import nn

import kway
from kway.profiling.workspaces import without_workspaces
from kway.zoo import get

# name: (model, batch on a CPU, batch on GPUs, whether that is for each GPU)
WORKS: dict[str, tuple[str, int, int, bool]] = {
    "lenet": ("lenet", 256, 256, False),
    "resnet18": ("resnet18", 32, 256, True),
    "mlp": ("mlp", 256, 256, False),
    "gpt-1m": ("gpt-1m", 16, 16, False),
    "gpt-124m": ("gpt-124m", 0, 16, True),
}
ON = {
    "cpu": (("lenet", "resnet18", "mlp", "gpt-1m"), "single,data", "1,2"),
    "gpu": (("lenet", "resnet18", "gpt-124m"), "single,data", ""),
}
# Of the mean error by check, of each single error, and how far apart candidates are whose order counts.
BARS = {"cpu": (0.10, 0.25, 0.10), "gpu": (0.08, 0.20, 0.08)}
MEMORY_BAR = 0.10


def main() -> int:
    """Plan, check, print the table, write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpus", default="", help="numbers of GPUs, such as 1,2,4; without it two CPU ranks")
    parser.add_argument("--works", default="", help=f"some of {', '.join(WORKS)}")
    parser.add_argument("--strategies", default="", help="some of the strategies: single,data,threads")
    parser.add_argument("--step-kinds", default="auto", help="some of the step kinds: graph,compiled-graph")
    parser.add_argument("--rounds", type=int, default=3, help="plans and checks of each work")
    parser.add_argument("--out", type=Path, required=True, help="the result, as JSON")
    options = parser.parse_args()
    kind = "gpu" if options.gpus else "cpu"
    works, strategies, devices = ON[kind]
    works = tuple(options.works.split(",")) if options.works else works
    strategies, devices = options.strategies or strategies, options.gpus or devices
    if not options.gpus:
        devices = " ".join(f"cpu:{count}" for count in devices.split(","))
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache
        print("measuring this machine", flush=True)
        measured = kway.measure(devices=options.gpus.split(",")[-1] if options.gpus else "cpu:2", quick=True)
        for number in range(options.rounds):
            for work in works:
                # The later ones are profiled anew: a plan is as good as its profile.
                planned = kway.plan(
                    job_of(work, kind == "gpu"),
                    devices=devices,
                    strategy=strategies,
                    step_kind=options.step_kinds,
                    batch_size_per_device=WORKS[work][2] if kind == "gpu" and WORKS[work][3] else None,
                    measurements=measured,
                    refresh=number > 0,
                    check=True,
                )
                row = row_of(work, number, planned)
                if kind == "gpu" and not number:
                    row["memory"] = memory_of(work, planned)
                rows.append(row)
                print(text_of(row), flush=True)
    result = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": measured.machine,
        "versions": measured.versions,
        "noisy": [line for line in measured.notices if "noisy" in line],
        "summary": summary(rows, BARS[kind]),
        "rows": rows,
    }
    options.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result["summary"], indent=2))
    return int(bool(result["summary"]["missed"]))


def job_of(work: str, on_gpus: bool) -> kway.Job:
    """Return the job of a work: drawn samples, SGD; bf16 on GPUs for what is usually trained so."""
    model, on_cpu, on_gpu, _ = WORKS[work]
    batch = on_gpu if on_gpus else on_cpu
    draw = torch.Generator().manual_seed(0)
    if model.startswith("gpt"):
        length, words = (1024, 50_257) if model == "gpt-124m" else (128, 256)
        tokens = torch.randint(words, (64 * batch, length + 1), generator=draw, dtype=torch.int32)
        data = tokens[:, :-1].contiguous(), tokens[:, 1:].long().contiguous()
        made = partial(get(model), (length,), words)
    else:
        count = 60_000 if on_gpus else 60 * batch
        data = torch.randn(count, 1, 28, 28, generator=draw), torch.randint(10, (count,), generator=draw)
        made = partial(get(model), (1, 28, 28), 10)
    job = kway.Job(
        model=made,
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.SGD, lr=0.01),
        data=data,
        batch_size=batch,
        name=work,
    )
    return replace(job, precision="bf16") if on_gpus and work != "lenet" else job


def row_of(work: str, number: int, planned: Any) -> dict[str, Any]:
    """Return what a check says: predicted and measured by candidate, and whether the order is right."""
    checked = [row for row in planned.candidates if row["measured_step_s"]]
    return {
        "work": work,
        "round": number,
        "mean_error": statistics.mean(abs(row["error"]) for row in checked),
        "candidates": [
            {
                key: row[key]
                for key in (
                    "strategy",
                    "devices",
                    "step_kind",
                    "step_s",
                    "measured_step_s",
                    "error",
                    "rounds",
                )
            }
            for row in checked
        ],
    }


def memory_of(work: str, planned: Any) -> list[dict[str, Any]]:
    """Train each candidate for a few steps and return its predicted bytes beside the allocator's peak."""
    found = []
    for row in planned.candidates:
        job = replace(job_of(work, True), batch_size=row["batch_size"])
        # As in a process of its own.
        gc.collect()
        without_workspaces()
        run = kway.train(
            job,
            devices=row["devices"],
            strategy=row["strategy"].split("=")[0],
            step_kind=row["step_kind"],
            steps=12,
            tune=False,
            echo=False,
        )
        peak = max(run.record.peak_memory_bytes)
        found.append(
            {
                "strategy": row["strategy"],
                "step_kind": row["step_kind"],
                "predicted": row["memory_bytes"],
                "peak": peak,
                "error": row["memory_bytes"] / peak - 1,
            }
        )
    return found


def right_order(rows: Sequence[dict[str, Any]], apart: float) -> tuple[int, int]:
    """Return how many pairs of candidates that are measured at least ``apart`` are predicted in that order, and of
    how many.
    """
    right = pairs = 0
    for one, other in combinations(rows, 2):
        fast, slow = sorted((one, other), key=lambda row: float(row["measured_step_s"]))
        if slow["measured_step_s"] >= (1 + apart) * fast["measured_step_s"]:
            pairs += 1
            right += fast["step_s"] < slow["step_s"]
    return right, pairs


def summary(rows: Sequence[dict[str, Any]], bars: tuple[float, float, float]) -> dict[str, Any]:
    """Hold all checks against the bars: median of the mean errors, the largest single one, the order."""
    mean_bar, single_bar, apart = bars
    errors = [abs(each["error"]) for row in rows for each in row["candidates"]]
    orders = [right_order(row["candidates"], apart) for row in rows]
    right, pairs = (sum(each[place] for each in orders) for place in (0, 1))
    memory = [abs(each["error"]) for row in rows for each in row.get("memory", [])]
    found: dict[str, Any] = {
        "median of mean errors": statistics.median(row["mean_error"] for row in rows),
        "largest error": max(errors),
        "pairs in the right order": right,
        "pairs": pairs,
    }
    missed = [
        *(["median of mean errors"] if found["median of mean errors"] > mean_bar else []),
        *(["largest error"] if found["largest error"] > single_bar else []),
        *(["pairs in the right order"] if right < pairs else []),
    ]
    if memory:
        found["largest error of memory"] = max(memory)
        missed += ["largest error of memory"] if max(memory) > MEMORY_BAR else []
    return {**found, "missed": missed}


def text_of(row: dict[str, Any]) -> str:
    """Write one check in a few lines."""
    lines = [f"{row['work']}, round {row['round'] + 1}: off by {row['mean_error']:.1%} on average"]
    for each in row["candidates"]:
        lines.append(
            f"  {each['strategy']:8} {each['step_kind']:15} predicted {1e3 * each['step_s']:8.3g} ms, "
            f"measured {1e3 * each['measured_step_s']:8.3g} ms, {each['error']:+.1%}"
        )
    for each in row.get("memory", []):
        lines.append(f"  memory of {each['strategy']} {each['step_kind']}: {each['error']:+.1%}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
