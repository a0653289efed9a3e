"""Measure what kway's step costs over a hand-written one, and write result.json beside this file."""

import argparse
import datetime
import json
import platform
import sys
from pathlib import Path
from typing import Any

from cases import measure, usable_cores

HERE = Path(__file__).resolve().parent
CASES = {"single": 1, "data=2": 2}
BAR = 1.05


def processor() -> str:
    """Name the processor's model."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    """Name what was measured."""
    import torch

    import kway

    return {"kway": kway.__version__, "torch": torch.__version__, "python": platform.python_version()}


def main() -> int:
    """Measure every case, print a line for each, write result.json. Exit code 1 for a ratio above BAR."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--max-spread", type=float, default=0.05, help="settled at this spread (default 0.05)"
    )
    parser.add_argument(
        "--max-seconds", type=float, default=180, help="at most this long a case (default 180)"
    )
    parser.add_argument(
        "--case", choices=CASES, action="append", help="only this case; writes no result.json"
    )
    options = parser.parse_args()
    cores = usable_cores()
    cases: dict[str, Any] = {}
    for name in options.case or CASES:
        ranks = CASES[name]
        threads = max(1, cores // ranks)
        case = measure("lenet", ranks, threads, options.max_spread, options.max_seconds)
        hand, own = case["candidates"]["by hand"], case["candidates"]["kway"]
        cases[name] = case
        print(
            f"{name}: by hand {hand['step_s'] * 1e3:.3f} ms, kway {own['step_s'] * 1e3:.3f} ms a step, "
            f"ratio {case['ratio']:.3f} (spread {case['ratio_spread']:.1%}; of the times {hand['spread']:.1%} and "
            f"{own['spread']:.1%}) "
            f"over {case['rounds']} rounds{'' if case['settled'] else ', NOT settled'}",
            flush=True,
        )
    if not options.case:
        result = {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "processor": processor(),
            "usable_cores": cores,
            "versions": versions(),
            "work": "LeNet, batch 256, SGD with momentum, fp32, 4,096 images in memory",
            "ratio": "median over rounds of kway's time by the hand-written one's in the same round",
            "spread": "(max - min) / median over the medians of five consecutive blocks of rounds",
            "cases": cases,
        }
        (HERE / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    return int(any(case["ratio"] > BAR for case in cases.values()))


if __name__ == "__main__":
    sys.exit(main())
