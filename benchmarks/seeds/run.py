"""Train and prove the seeds on 1, 2 and 4 GPUs of one machine, beside the yardstick's rows from the same run.

Every measurement is a process of its own with a time limit. Its rows are appended to ROWS (``--out`` with
``.rows.jsonl``) as they come, so that nothing is lost by what fails later; the summary is made from that file,
or from several with ``--merge``.
"""

import argparse
import datetime
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from summary import summarise

HERE = Path(__file__).resolve().parent
SOURCES = HERE.parents[1] / "src"
GRACE_S = 5.0


@dataclass(frozen=True)
class Part:
    """One process: its name, command without the interpreter, and time limit in seconds."""

    name: str
    command: list[str]
    limit: float
    launcher: tuple[str, ...] = ()


def parts(options: argparse.Namespace, k: int) -> list[Part]:
    """List what to measure on k devices, what matters most first."""
    kway = str(HERE / "kway_part.py")
    shared = ["--k", str(k), *(["--cpu"] if options.cpu else ["--data", str(options.data)])]
    epochs = ["--epochs", "2"] if options.cpu else ["--epochs", "10"]
    resnet = [kway, "train", "--model", "resnet18", "--precision", "fp32" if options.cpu else "tf32"]
    chosen = [
        Part("machine", [kway, "machine"], 60),
        Part("lenet", [kway, "train", "--model", "lenet", *epochs, *shared], 120),
        Part("resnet18", [*resnet, *epochs, *shared], 150),
        Part("proofs", [kway, "prove", *(["--models", "lenet"] if options.cpu else []), *shared], 270),
    ]
    if options.yardstick is not None and not options.cpu:
        file = [str(HERE / "yardstick_part.py"), str(options.yardstick / "anchors.py")]
        torchrun = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={k}")
        chosen += [
            Part("yardstick-ddp", [*file, "peers"], 90, torchrun),
            Part("yardstick-seeds", [*file, "seeds", "--k", str(k)], 90),
        ]
    exact = [kway, "train", "--model", "lenet", "--level", "bits", "--epochs", "2", *shared]
    chosen.append(Part("lenet-bits", exact, 90))
    if k > 1:
        chosen.append(Part("resnet18-loose", [*resnet, *epochs, "--level", "loose", *shared], 150))
    wanted = options.parts.split(",") if options.parts else [part.name for part in chosen]
    return [part for part in chosen if part.name in wanted]


def run(part: Part, k: int, options: argparse.Namespace, limit: float) -> list[dict[str, Any]]:
    """Run one part; append each of its rows, and one that says how it ended, to the file. Return the rows."""
    rows: list[dict[str, Any]] = []
    begun, since = time.monotonic(), time.time()
    command = [sys.executable, *part.launcher, *part.command]
    if part.command[0].endswith("kway_part.py"):
        command += ["--since", repr(since)]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(SOURCES), os.environ.get("PYTHONPATH", "")]),
    }
    if options.data is not None:
        environment["FASHION_MNIST"] = str(options.data / "fashion-mnist")
    log = rows_file(options).with_suffix(f".{part.name}-{k}.log")

    def keep(row: dict[str, Any]) -> None:
        row = {"k": k, "part": part.name, **row}
        rows.append(row)
        with rows_file(options).open("a") as out:
            out.write(json.dumps(row) + "\n")

    with log.open("wb") as errors, subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=errors, env=environment, start_new_session=True
    ) as process:  # fmt: skip
        # A group of its own, so that what runs out of time ends with its ranks and loader workers.
        stop = threading.Timer(limit, end, [process])
        stop.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                row = row_of(line)
                if row is not None:
                    keep(row)
            code = process.wait()
        finally:
            stop.cancel()
            end(process)
    seconds = time.monotonic() - begun
    timed_out = code != 0 and seconds >= limit
    ended: dict[str, Any] = {"kind": "end", "exit_code": code, "seconds": seconds, "timed_out": timed_out}
    if code != 0:
        ended["last_words"] = log.read_text(errors="replace")[-1500:]
    keep(ended)
    print(f"k={k} {part.name}: {len(rows) - 1} rows in {seconds:.1f} s, exit code {code}", flush=True)
    return rows


def row_of(line: bytes) -> dict[str, Any] | None:
    """Read one line of a part's output; what is no JSON object is not a row."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def end(process: "subprocess.Popen[bytes]") -> None:
    """End the group of a process: asked first, then killed."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except (ProcessLookupError, PermissionError):
            return
        deadline = time.monotonic() + GRACE_S
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)


def rows_file(options: argparse.Namespace) -> Path:
    """Return where the rows go."""
    out: Path = options.out
    return out.with_suffix(".rows.jsonl")


def visible_gpus() -> int:
    """Count the GPUs, without torch in this process."""
    sys.path.insert(0, str(SOURCES))
    from kway.devices.topology import discover

    return len(discover().gpus)


def measure(options: argparse.Namespace) -> None:
    """Run all parts for every k that this machine has devices for, as long as the time allows."""
    deadline = time.monotonic() + options.seconds
    available = 2 if options.cpu else visible_gpus()
    for k in [int(text) for text in options.gpus.split(",")]:
        if k > available:
            print(f"k={k} left out: {available} devices", flush=True)
            continue
        for part in parts(options, k):
            left = deadline - time.monotonic()
            if left < GRACE_S:
                print(f"k={k} {part.name} left out: no time", flush=True)
                continue
            run(part, k, options, min(part.limit, left))


def main() -> int:
    """Measure, then summarise. Exit code 1 where a bar is missed or a part failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help="root of the data sets, with fashion-mnist/ in it")
    parser.add_argument("--yardstick", type=Path, help="folder of anchors.py; without, no rows of others")
    parser.add_argument("--out", type=Path, default=HERE / "result.json", metavar="FILE")
    parser.add_argument("--gpus", default="1,2,4", help="numbers of GPUs (default 1,2,4)")
    parser.add_argument("--parts", help="only these, with commas between")
    parser.add_argument("--seconds", type=float, default=3600, help="start nothing after this time")
    parser.add_argument("--cpu", action="store_true", help="a smoke run: tiny, on CPU ranks; judges nothing")
    parser.add_argument(
        "--merge", type=Path, nargs="+", metavar="ROWS", help="measure nothing: summarise these"
    )
    options = parser.parse_args()
    if not options.cpu and not options.merge and options.data is None:
        parser.error("--data is needed")
    if not options.merge:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        measure(options)
    files = options.merge or [rows_file(options)]
    rows = [json.loads(line) for file in files if file.exists() for line in file.read_text().splitlines()]
    result, table, ok = summarise(rows, judge=not options.cpu)
    result = {"date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), **result}
    options.out.write_text(json.dumps(result, indent=2) + "\n")
    print(table)
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
