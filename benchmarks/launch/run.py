"""Measure the seconds from command to first step on two CPU ranks, by launcher, and write result.json."""

import argparse
import datetime
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from job import FIRST  # noqa: E402

LAUNCHERS = ("torchrun", "mpirun", "kway launch")
SCRIPTS = ("by-hand", "kway")
LIMIT_S = 180.0
# Of the cores, over the last minute: above this, what else runs is part of what was measured.
QUIET = 0.25


def free_port() -> int:
    """Return a port that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def command_of(launcher: str, script: str) -> tuple[list[str], dict[str, str]]:
    """Return a command and what it needs in its environment."""
    work = [str(HERE / "job.py"), script]
    if launcher == "torchrun":
        return [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node=2",
            *work,
        ], {}
    if launcher == "kway launch":
        return [sys.executable, "-m", "kway", "launch", "--devices", "cpu:2", *work], {}
    # Open MPI would refuse root, and two ranks on one core. kway's ranks meet by themselves; by hand they are told.
    needs = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    if script == "by-hand":
        needs |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return ["mpirun", "--oversubscribe", "-n", "2", sys.executable, *work], needs


def seconds_to_first_step(launcher: str, script: str) -> tuple[float, float]:
    """Start a command; return the seconds to rank 0's first step, and to the command's end.

    Raises ``RuntimeError`` where it fails or says nothing.
    """
    command, needs = command_of(launcher, script)
    begun = time.monotonic()
    done = subprocess.run(
        command, env=os.environ | needs, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    ended = time.monotonic()
    said = [line.partition(FIRST)[2] for line in done.stdout.splitlines() if FIRST in line]
    if done.returncode != 0 or len(said) != 1:
        raise RuntimeError(f"{' '.join(command)}: exit code {done.returncode}: {done.stderr[-1500:]}")
    return float(said[0]) - begun, ended - begun


def figures(values: list[float]) -> dict[str, Any]:
    """Return the median beside its spread, (max - min) / median, and all values."""
    middle = median(values)
    return {"median_s": middle, "spread": (max(values) - min(values)) / middle, "s_of_rounds": values}


def rows_of(
    first: dict[tuple[str, str], list[float]], end: dict[tuple[str, str], list[float]]
) -> list[dict[str, Any]]:
    """Return a row a candidate. ``ratio``: the median over rounds of its time by that of `kway launch` in the same."""
    rows = []
    for (launcher, script), seconds in first.items():
        ratios = [one / other for one, other in zip(seconds, first["kway launch", script], strict=True)]
        row = {"script": script, "launcher": launcher, "ratio": median(ratios)}
        rows.append(row | {"to_first_step": figures(seconds), "to_end": figures(end[launcher, script])})
    return rows


def versions() -> dict[str, str]:
    """Name what was measured."""
    import torch

    import kway

    told = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, check=True).stdout
    return {
        "kway": kway.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "mpirun": told.splitlines()[0],
    }


def machine() -> dict[str, Any]:
    """Describe where it was measured."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {"processor": names[0] if names else platform.machine(), "usable_cores": os.cpu_count()}


def main() -> int:
    """Start all in turns, one round that is not counted first; print a line for each and write result.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", type=Path, default=HERE / "result.json")
    options = parser.parse_args()
    if shutil.which("mpirun") is None:
        print("there is no mpirun here: install Open MPI", file=sys.stderr)
        return 2
    load_before = os.getloadavg()[0]
    candidates = [(launcher, script) for script in SCRIPTS for launcher in LAUNCHERS]
    first: dict[tuple[str, str], list[float]] = {each: [] for each in candidates}
    end: dict[tuple[str, str], list[float]] = {each: [] for each in candidates}
    for number in range(options.rounds + 1):
        # In another order each time: who comes after whom must not matter.
        at = number % len(candidates)
        for each in candidates[at:] + candidates[:at]:
            to_first, to_end = seconds_to_first_step(*each)
            print(f"round {number}: {' / '.join(each)} {to_first:.2f} s, {to_end:.2f} s", file=sys.stderr)
            if number:
                first[each].append(to_first)
                end[each].append(to_end)
    quiet = load_before / (os.cpu_count() or 1) < QUIET
    record = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": versions(),
        "work": "LeNet, batch 256, SGD, fp32, one step on two CPU ranks (gloo)",
        "spread": "(max - min) / median over all rounds",
        "ratio": "the time to the first step by that of kway launch in the same round, the median over rounds",
        "rounds": options.rounds,
        "load_before": load_before,
        "quiet": quiet,
        "results": rows_of(first, end),
    }
    options.out.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    for row in record["results"]:  # type: ignore[attr-defined]
        one, whole = row["to_first_step"], row["to_end"]["median_s"]
        figure = f"{one['median_s']:6.2f} s (spread {one['spread']:.0%}, ratio {row['ratio']:.2f})"
        print(f"{row['script']:8} {row['launcher']:12} {figure}, to its end {whole:.2f} s")
    if not quiet:
        print(f"NOT quiet: load {load_before:.1f} on {os.cpu_count()} cores before it began")
    return 0


if __name__ == "__main__":
    sys.exit(main())
