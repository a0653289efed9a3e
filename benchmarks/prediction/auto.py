"""Is ``--strategy auto`` as fast as the best candidate of a check?

For each work: every candidate is run (``kway.plan(check=True)``), then the work is trained with ``strategy="auto"``,
three times by what that plan has left, and three times in a cache of its own, where the first one looks for itself, in
ten seconds; each time the best candidate of the check is run again before. Nothing is tuned, as in a check. Exit code 1
where a median of three is over 1.1 times that of the best candidate, in turns with it.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from run import ON, job_of

import kway
from kway.jobs.checking import ROUNDS, measured, steps_of
from kway.strategies.levels import DEFAULT_SHARDS

# (work, batch in place of its own)
WORKS: tuple[tuple[str, int | None], ...] = (
    ("lenet", 32), ("lenet", 256), ("lenet", 2048), ("resnet18", None), ("mlp", None), ("gpt-1m", None),
    ("gpt-124m", None),
)  # fmt: skip
BAR, HOWS = 1.1, ("by a plan", "alone")


def main() -> int:
    """Check each work, train it with auto, print and write how they compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpus", action="store_true", help="on all GPUs; without it CPU ranks")
    parser.add_argument("--works", default="", help="some of the works, such as lenet-32,mlp")
    parser.add_argument("--out", type=Path, required=True, help="the result, as JSON")
    options = parser.parse_args()
    works = [work for work in WORKS if work[0] in ON["gpu" if options.gpus else "cpu"][0]]
    known = [named(*work) for work in works]
    wanted = options.works.split(",") if options.works else known
    if unknown := sorted({*wanted} - {*known}):
        parser.error(f"works {', '.join(unknown)}: there are {', '.join(known)}")
    rows = []
    for work, batch in works:
        if named(work, batch) in wanted:
            rows.append({"work": named(work, batch), **compared(work, batch, options.gpus)})
            print(text_of(rows[-1]), flush=True)
    result = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "missed": missed(rows), "rows": rows}
    options.out.write_text(json.dumps(result, indent=2) + "\n")
    return int(bool(result["missed"]))


def named(work: str, batch: int | None) -> str:
    """Return what a work is called here."""
    return work if batch is None else f"{work}-{batch}"


def compared(work: str, batch: int | None, on_gpus: bool) -> dict[str, Any]:
    """Return what the best candidate of a check took a step, and what runs with ``auto`` did, by what they knew."""
    job = job_of(work, on_gpus)
    job = job if batch is None else replace(job, batch_size=batch)
    with own_cache():
        rows = kway.plan(job, devices=gpu_sets() if on_gpus else "auto", check=True).candidates
        best = min(
            (row for row in rows if row.get("measured_step_s")), key=lambda row: row["measured_step_s"]
        )
        steps = steps_of(best["measured_step_s"], on_gpus)
        planned = trained(job, steps, best)
    with own_cache():
        alone = trained(job, steps, best)
    named = {key: best[key] for key in ("strategy", "devices", "step_kind", "measured_step_s")}
    return {"best": named, "by a plan": planned, "alone": alone}


def gpu_sets() -> str:
    """Return every number of GPUs: a check of the larger works on CPU ranks beside them would take hours."""
    return " ".join(
        f"cuda:{','.join(map(str, range(count)))}" for count in range(1, torch.cuda.device_count() + 1)
    )


@contextmanager
def own_cache() -> Iterator[None]:
    """Let nothing be remembered from before while open."""
    with tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache
        yield


def trained(job: kway.Job, steps: int, best: dict[str, Any]) -> dict[str, Any]:
    """Train with ``auto`` and as ``best`` says, in turns; return what was chosen, and what a step took, medians."""
    runs, others = [], []
    for _ in range(ROUNDS):
        others.append(measured(job, best, "math", DEFAULT_SHARDS) or float("nan"))
        run = kway.train(job, strategy="auto", epochs=steps, steps=steps, tune=False, echo=False).record
        runs.append(
            {key: getattr(run, key) for key in ("strategy", "devices", "step_kind", "measured_step_s")}
        )
    took = statistics.median(run["measured_step_s"] for run in runs)
    return {
        "ratio": took / statistics.median(others),
        "step_s": took,
        "runs": runs,
        "best_step_s": others,
    }


def missed(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the works whose runs with ``auto`` took too long, and by what they knew."""
    return [f"{row['work']} {how}" for row in rows for how in HOWS if row[how]["ratio"] > BAR]


def text_of(row: dict[str, Any]) -> str:
    """Write one work in a line."""
    best = row["best"]
    took = []
    for how in HOWS:
        chosen = ", ".join(dict.fromkeys(f"{run['strategy']} {run['step_kind']}" for run in row[how]["runs"]))
        took.append(f"{how} {row[how]['ratio']:.2f} times ({chosen})")
    named = f"{best['strategy']} {best['step_kind']}, {1e3 * best['measured_step_s']:.3g} ms"
    return f"{row['work']}: auto took {', '.join(took)} as long as the best candidate ({named})"


if __name__ == "__main__":
    sys.exit(main())
