"""A job in processes of its own: what it says, which processes it has, and their end."""

import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCES = HERE.parents[1] / "src"
MARK = "KWAY_FAULTS_RUN"
GONE_WITHIN_S = 10.0


class Running:
    """One start of job.py. ``step``: the last one that it said; ``first``: the first; ``lines``: all it said."""

    def __init__(self, folder: Path, devices: str, kind: str) -> None:
        self.mark, self.folder = uuid.uuid4().hex, folder
        environment = {
            **os.environ,
            MARK: self.mark,
            "PYTHONPATH": os.pathsep.join([str(SOURCES), os.environ.get("PYTHONPATH", "")]),
        }
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "job.py"), str(folder), devices, kind],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self.lines: list[str] = []
        self.errors: list[str] = []
        self.first: int | None = None
        self.step = 0
        self.known: dict[int, int] = {}
        self._threads = [
            threading.Thread(target=self._read, daemon=True),
            threading.Thread(target=self._complain, daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())
            words = line.split()
            if words and words[0] == "step":
                self.step = int(words[1])
                self.first = self.step if self.first is None else self.first

    def _complain(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.errors.append(line.rstrip())

    def pids(self) -> dict[int, int]:
        """Map the process id of each living process of the job to its rank, -1 where it is none."""
        found = {}
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                variables = (entry / "environ").read_bytes().split(b"\0")
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if f"{MARK}={self.mark}".encode() in variables:
                ranks = [int(v[5:]) for v in variables if v.startswith(b"RANK=")]
                found[int(entry.name)] = ranks[0] if ranks and b"kway.launch.worker" in command else -1
        return found

    def until_step(self, step: int, limit: float = 90) -> bool:
        """Wait until a step was said, ``step`` at least; false where the job ended before."""
        deadline = time.monotonic() + limit
        while self.first is None or self.step < step:
            if self.process.poll() is not None or time.monotonic() > deadline:
                return False
            time.sleep(0.001)
        return True

    def end(self, limit: float = 120) -> int:
        """Wait for the end; return the exit code."""
        code = self.process.wait(limit)
        for thread in self._threads:
            thread.join(5)
        return code

    def left(self) -> dict[int, int]:
        """Wait until no process of the job is there, for GONE_WITHIN_S at most; return those that are."""
        deadline = time.monotonic() + GONE_WITHIN_S
        while (found := self.pids()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return found


def kill(pids: list[int]) -> None:
    """SIGKILL each."""
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def unfinished(folder: Path) -> list[str]:
    """List the saves in a folder of checkpoints that were begun and not ended."""
    try:
        return [entry.name for entry in os.scandir(folder) if entry.name.endswith(".part")]
    except FileNotFoundError:
        return []


def complete(folder: Path) -> list[int]:
    """List the steps whose checkpoints bear their final name."""
    try:
        names = [entry.name for entry in os.scandir(folder)]
    except FileNotFoundError:
        return []
    return sorted(int(name[5:]) for name in names if name.startswith("step-") and name[5:].isdigit())
