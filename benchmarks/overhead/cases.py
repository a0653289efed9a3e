"""One case of a comparison on the CPU, in processes of its own."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


def usable_cores() -> int:
    """Count the processors that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def measure(work: str, ranks: int, threads: int, max_spread: float, max_seconds: float) -> dict[str, Any]:
    """Run one case in processes of its own and return what it wrote. ``work``: a name of ``candidates.WORKS``."""
    start = [sys.executable]
    if ranks > 1:
        start += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    # Set for both candidates alike, before torch reads it.
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rounds.json"
        options = [
            "--work",
            work,
            "--threads",
            threads,
            "--ranks",
            ranks,
            "--max-spread",
            max_spread,
            "--max-seconds",
            max_seconds,
        ]
        command = [*start, HERE / "rounds.py", file, *options]
        subprocess.run([str(part) for part in command], env=environment, check=True)
        result: dict[str, Any] = json.loads(file.read_text())
    return {"ranks": ranks, "threads_a_rank": threads, **result}
