"""One comparison on the CPU with the rounds of benchmarks/overhead: kway against a hand-written loop; prints a row."""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "overhead"))

from cases import measure, usable_cores

CORES = 2


def main() -> int:
    """Measure and print the row. ``k`` ranks share two cores, so that the two layouts have the same machine."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", help="a name of overhead/candidates.py")
    parser.add_argument("--k", type=int, default=1)
    parser.add_argument("--max-seconds", type=float, default=300)
    options = parser.parse_args()
    threads = max(1, min(CORES, usable_cores()) // options.k)
    case = measure(options.work, options.k, threads, max_spread=0.05, max_seconds=options.max_seconds)
    print(json.dumps({"kind": "case", "work": options.work, **case}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
