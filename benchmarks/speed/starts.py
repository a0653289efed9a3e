"""Start-up: from the command to the first step, `kway train lenet` against a start by hand, in turns; prints a row.

The time of a start ends where rank 0 says that it stands before its first step: kway with its line about the
devices, the script by hand with its own. The rest of either is waited for outside the time.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from bars import settled_spread  # noqa: E402
from started_by_hand import READY  # noqa: E402

LIMIT_S = 120.0


def seconds_until(command: list[str], word: str) -> float:
    """Start a command and return the seconds until it prints a line that begins with ``word``.

    Raises ``RuntimeError`` where it fails or ends without that line.
    """
    begun = time.perf_counter()
    found: float | None = None
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            if found is None and line.startswith(word):
                found = time.perf_counter() - begun
        code = process.wait(LIMIT_S)
        errors.seek(0)
        if code != 0 or found is None:
            raise RuntimeError(f"{' '.join(command)}: exit code {code}: {errors.read()[-1500:]}")
    return found


def commands(options: argparse.Namespace, folder: str) -> dict[str, tuple[list[str], str]]:
    """Return the two commands and the word that each says before its first step."""
    k = options.k
    devices = f"cpu:{k}" if options.cpu else "cuda:" + ",".join(map(str, range(k)))
    data = ["--data", "fashion-mnist", "--data-dir", str(options.data)] if options.data else []
    own = ["-m", "kway", "train", "lenet", "--devices", devices, "--steps", "1", "--out", folder, *data]
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={k}"] if k > 1 else []
    hand = [
        *torchrun,
        str(HERE / "started_by_hand.py"),
        *([] if options.cpu else ["--cuda"]),
        *(["--data", str(options.data)] if options.data else []),
    ]
    return {"kway": ([sys.executable, *own], "devices "), "by hand": ([sys.executable, *hand], READY)}


def start_row(times: dict[str, list[float]], **facts: Any) -> dict[str, Any]:
    """Make the row: the ratio is the median over rounds of kway's time by the other's in the same round."""
    ratios = [own / hand for own, hand in zip(times["kway"], times["by hand"], strict=True)]
    return {
        "kind": "start",
        **facts,
        "kway_s": median(times["kway"]),
        "by_hand_s": median(times["by hand"]),
        "ratio": median(ratios),
        "ratio_spread": settled_spread(ratios),
        "s_of_rounds": times,
    }


def main() -> int:
    """Start both in turns, one round that is not counted first, and print the row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--k", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--cpu", action="store_true")
    options = parser.parse_args()
    times: dict[str, list[float]] = {"kway": [], "by hand": []}
    for number in range(options.rounds + 1):
        for name in times if number % 2 else reversed(times):
            with tempfile.TemporaryDirectory() as folder:
                command, word = commands(options, f"{folder}/run")[name]
                seconds = seconds_until(command, word)
            print(f"round {number}, {name}: {seconds:.2f} s", file=sys.stderr, flush=True)
            if number:
                times[name].append(seconds)
    device = "cpu" if options.cpu else "cuda"
    print(json.dumps(start_row(times, device=device)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
