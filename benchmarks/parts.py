"""Measurements that are processes of their own, with a time limit; what they print as JSON lines is kept.

A row goes to its file as soon as it is there, so that nothing is lost by what fails or runs out of time later.
"""

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

SOURCES = Path(__file__).resolve().parents[1] / "src"
GRACE_S = 5.0

Row = dict[str, Any]


@dataclass(frozen=True)
class Part:
    """One process: its name, command without the interpreter, and time limit in seconds.

    ``launcher``: what comes between interpreter and command. ``timed``: whether the command takes ``--since``,
    the time (seconds since the epoch) at which it was given.
    """

    name: str
    command: list[str]
    limit: float
    launcher: tuple[str, ...] = ()
    timed: bool = False


def run(part: Part, k: int, file: Path, limit: float, data: Path | None = None) -> list[Row]:
    """Run one part on k devices; append each of its rows, and one that says how it ended, to ``file``.

    A row has ``k``, ``part`` and ``at`` (seconds since the epoch) beside what was printed. ``limit``: seconds.
    ``data``: the root of the data sets. Returns the rows, the one of the end last.
    """
    rows: list[Row] = []
    begun, since = time.monotonic(), time.time()
    command = [sys.executable, *part.launcher, *part.command]
    if part.timed:
        command += ["--since", repr(since)]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(SOURCES), os.environ.get("PYTHONPATH", "")]),
    }
    if data is not None:
        environment["FASHION_MNIST"] = str(data / "fashion-mnist")
    log = file.with_suffix(f".{part.name}-{k}.log")

    def keep(row: Row) -> None:
        row = {"k": k, "part": part.name, "at": time.time(), **row}
        rows.append(row)
        with file.open("a") as out:
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
    ended: Row = {"kind": "end", "exit_code": code, "seconds": seconds, "timed_out": timed_out}
    if code != 0:
        ended["last_words"] = log.read_text(errors="replace")[-1500:]
    keep(ended)
    print(f"k={k} {part.name}: {len(rows) - 1} rows in {seconds:.1f} s, exit code {code}", flush=True)
    return rows


def row_of(line: bytes | str) -> Row | None:
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


def visible_gpus() -> int:
    """Count the GPUs, without torch in this process."""
    if str(SOURCES) not in sys.path:
        sys.path.insert(0, str(SOURCES))
    from kway.devices.topology import discover

    return len(discover().gpus)


def columns(lines: list[list[str]]) -> str:
    """Set rows of cells, all of one length, in columns."""
    widths = [max(len(line[at]) for line in lines) for at in range(len(lines[0]))]
    return "\n".join(
        "  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )
