"""Failure as data: what is to go wrong, on which rank, at which step. Test code, made to be called from user code.

A model file for ``kway train FILE:Model`` calls ``point`` in its forward (or a metric does):

    import os, sys
    sys.path.insert(0, os.environ["KWAY_TEST_INJECTOR"])      # the folder of this file
    from injector import point

    class Model(...):
        def forward(self, x):
            point(self)                                        # evaluation does not count as steps
            ...

and whoever starts it says what should happen:

    env = {**os.environ, **environment(Fault("kill", rank=1, step=7))}
    subprocess.run([sys.executable, "-m", "kway", "train", "file.py:Model", ...], env=env)

A step is a call of ``point`` in this process (the first is 0): where a model is called several times in a step
(micro-batches, shards at level bits), say ``calls_per_step``; where the true step is known, pass ``step=``. A
resumed or restarted process counts anew, so ``once`` names a file that is made when the fault strikes, and as long
as it exists the fault does not strike again. It also tells that the fault has struck, and when (its mtime).
"""

import contextlib
import json
import os
import random
import resource
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

FAULTS = "KWAY_TEST_FAULTS"
FOLDER = "KWAY_TEST_INJECTOR"
KINDS = ("kill", "stop", "slow", "raise", "exit", "fill_disk", "corrupt")
_SMALL = 256 << 20
_calls = [0]


class InjectedError(Exception):
    """What the kind ``raise`` raises."""


class NoRightsError(Exception):
    """This process may not mount; the message says why. Tests skip with it."""


@dataclass(frozen=True)
class Fault:
    """One fault, on ``rank`` (of ``RANK``; 0 without) at ``step``.

    ``kill``: SIGKILL. ``stop``: SIGSTOP. ``slow``: sleeps ``seconds`` at this and the following ``steps - 1`` steps.
    ``raise``: an ``InjectedError``. ``exit``: ``os._exit(code)``. ``fill_disk``: fills the file system of the folder
    ``path``, which must be a small one (see ``small_disk``); without a ``path``, no file of this process can grow
    beyond ``size`` bytes from now on (EFBIG instead of ENOSPC, and no rights needed). ``corrupt``: flips ``size``
    bytes of the newest file that matches the pattern ``path``.
    """

    kind: str
    rank: int
    step: int
    steps: int = 1
    seconds: float = 1.0
    code: int = 3
    path: str = ""
    size: int = 1
    calls_per_step: int = 1
    once: str = ""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"unknown kind {self.kind!r}: known are {', '.join(KINDS)}")

    def is_due(self, rank: int, step: int) -> bool:
        """Whether it strikes here and now; makes the file ``once``."""
        if rank != self.rank or not self.step <= step < self.step + self.steps:
            return False
        if self.once:
            try:
                Path(self.once).touch(exist_ok=False)
            except FileExistsError:
                return False
        return True

    def strike(self) -> None:
        """Let it happen."""
        if self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif self.kind == "slow":
            time.sleep(self.seconds)
        elif self.kind == "raise":
            raise InjectedError(f"rank {self.rank}, step {self.step}")
        elif self.kind == "exit":
            os._exit(self.code)
        elif self.kind == "corrupt":
            flip(newest(self.path), self.size)
        elif self.path:
            fill(Path(self.path))
        else:
            hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.size, hard))


def environment(*faults: Fault) -> dict[str, str]:
    """Return the variables by which the processes of a job learn of ``faults`` and find this file."""
    return {
        FAULTS: json.dumps([asdict(fault) for fault in faults]),
        FOLDER: str(Path(__file__).resolve().parent),
    }


def point(module: Any = None, *, step: int | None = None, rank: int | None = None) -> None:
    """Strike the faults of the environment that are due. A ``module`` in evaluation mode does not count."""
    if module is not None and not module.training:
        return
    calls, _calls[0] = _calls[0], _calls[0] + 1
    here = int(os.environ.get("RANK", "0")) if rank is None else rank
    for fault in _planned():
        if fault.is_due(here, calls // fault.calls_per_step if step is None else step):
            fault.strike()


def _planned() -> Iterable[Fault]:
    return [Fault(**fields) for fields in json.loads(os.environ.get(FAULTS, "[]"))]


def newest(pattern: str) -> Path:
    """Return the newest file that matches ``pattern``, ``**`` included. Raises ``FileNotFoundError``."""
    root = Path(pattern).anchor or "."
    found = [path for path in Path(root).glob(pattern.removeprefix(Path(pattern).anchor)) if path.is_file()]
    if not found:
        raise FileNotFoundError(pattern)
    return max(found, key=lambda path: path.stat().st_mtime_ns)


def flip(path: Path, count: int = 1, seed: int = 0) -> list[int]:
    """Flip all bits of ``count`` bytes of a file in place, at places that ``seed`` fixes; return the offsets."""
    content = bytearray(path.read_bytes())
    places = sorted(random.Random(seed).sample(range(len(content)), min(count, len(content))))
    for place in places:
        content[place] ^= 0xFF
    with path.open("r+b") as file:
        file.write(content)
        os.fsync(file.fileno())
    return places


def fill(folder: Path) -> Path:
    """Fill the file system of ``folder``; return the file that does. Raises ``ValueError`` for a large one."""
    found = os.statvfs(folder)
    if found.f_blocks * found.f_frsize > _SMALL:
        raise ValueError(f"{folder} is on a disk of more than {_SMALL >> 20} MiB: that is not filled")
    filler = folder / "filler"
    for size in (1 << 20, 1 << 12, 1):
        with filler.open("ab", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(b"\0" * size):
                pass
    return filler


@contextlib.contextmanager
def small_disk(folder: Path, size: int) -> Iterator[Path]:
    """Mount a file system of ``size`` bytes on ``folder``. Raises ``NoRightsError``."""
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "kway-test", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise NoRightsError(f"cannot mount: {error}") from None
    if done.returncode != 0:
        raise NoRightsError(f"cannot mount: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
