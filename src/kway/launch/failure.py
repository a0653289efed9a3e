"""How ranks fail, and which failure is the cause of the others."""

import signal
import time
import traceback
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from kway.errors import KwayError, RankError, line_of, text_of
from kway.launch.own_frames import without_own_frames
from kway.worker_deaths import death, shared_memory, too_little_shared_memory

# What the survivors of a dead peer report: true, but never the cause.
_CONSEQUENCES = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "broken pipe",
    "socket closed",
    "failed to recv",
    "failed to send",
    "remote process exited",
    "nccl communicator was aborted",
    "ncclremoteerror",
    "timed out waiting",
)
_CONSEQUENCE_TYPES = ("DistBackendError", "DistNetworkError", "DistStoreError")
# How what torch itself raises begins or goes on where a device or a connection is lost.
_LOST_DEVICE, _LOST_PEER = ("CUDA error", "NCCL"), "gloo/transport"
# What Python leaves with where a standard stream cannot be flushed at the end.
UNFLUSHED = 120


@dataclass(frozen=True)
class Failure:
    """One rank's end before its time. ``when`` is monotonic time in seconds, the same clock in all ranks.

    ``cause``: one line; ``words``: the whole message of an exception. ``error`` is the rank's exception as a payload,
    where it is one of kway's own. ``died``: see ``RankError``.
    ``aborted``: the process ended itself by SIGABRT, and may have said why. ``left_early``: it left as if all was done.
    """

    rank: int
    when: float
    exit_code: int
    cause: str
    kind: str = ""
    traceback: str = ""
    error: bytes | None = None
    died: bool = False
    aborted: bool = False
    words: str = ""
    left_early: bool = False

    @property
    def is_consequence(self) -> bool:
        """Whether this is what a rank says whose peer is gone, or which was told what its peer raised."""
        if self.kind in (*_CONSEQUENCE_TYPES, RankError.__name__):
            return True
        text = (self.words or self.cause).lower()
        return self.kind == "RuntimeError" and any(sign in text for sign in _CONSEQUENCES)


def first(failures: Iterable[Failure]) -> Failure:
    """Pick the failure to report: the earliest, where those that only follow from another rank come last."""
    return min(failures, key=lambda failure: (failure.is_consequence, failure.when))


def of_exception(rank: int, error: BaseException) -> Failure:
    """Describe an exception that left the task of a rank."""
    from kway.launch.payload import dump

    when = time.monotonic()
    if isinstance(error, SystemExit):
        return _of_exit(rank, error, when)
    kept = None
    if isinstance(error, KwayError) and not isinstance(error, RankError):
        try:
            kept = dump(error)
        except Exception:  # an error that cannot travel is still reported, by its text
            kept = None
    lines = "".join(traceback.format_exception(without_own_frames(error)))
    cause = line_of(error) + _of_loader(rank, error)
    whole, kind = text_of(error), type(error).__name__
    if kept is not None:
        # All of the message follows by itself: a table once is enough.
        before, _, after = lines.rpartition(whole)
        lines = f"{before}{whole.partition(chr(10))[0]}{after}"
    return Failure(rank, when, 1, cause, kind, lines, kept, _is_loss(error), words=whole)


def _is_loss(error: BaseException) -> bool:
    """Whether torch raised this for a lost device or peer. Words alone say nothing: anybody may use them."""
    kind, text = type(error), text_of(error)
    if kind.__module__.partition(".")[0] == "torch":
        # A kernel's assertion speaks of the numbers that it was given.
        lost = kind.__name__ in (*_CONSEQUENCE_TYPES, "AcceleratorError")
        return lost and "device-side assert" not in text
    return kind is RuntimeError and (text.startswith(_LOST_DEVICE) or _LOST_PEER in text)


def _of_loader(rank: int, error: BaseException) -> str:
    """Add to torch's words on a ``DataLoader`` of the user's own which worker it was, and what helps."""
    text = text_of(error)
    if text.startswith("DataLoader worker"):
        for frame, _ in traceback.walk_tb(error.__traceback__):
            workers = getattr(frame.f_locals.get("self"), "_workers", None)
            found = death(workers, rank) if isinstance(workers, list) else None
            if found is not None:
                return f" ({found})"
    return f" ({shared_memory()})" if too_little_shared_memory(text) else ""


def _of_exit(rank: int, error: SystemExit, when: float) -> Failure:
    if error.code is not None and not isinstance(error.code, int):  # as Python does: printed, and 1
        cause = line_of(error)
        # There is no traceback that would show the rest.
        whole = "" if text_of(error) in cause else f"SystemExit: {text_of(error)}\n"
        return Failure(rank, when, 1, cause, "SystemExit", whole)
    code = error.code or 0
    if code == 0:
        return Failure(rank, when, 1, "ended early: it left with exit code 0 before its work was done")
    return Failure(rank, when, code & 0xFF or 1, f"left with exit code {code}", "SystemExit")


def of_exit_status(rank: int, status: int) -> Failure:
    """Describe a process that ended without a word. ``status``: exit code, or minus the signal's number."""
    now = time.monotonic()
    if status < 0:
        try:
            name = signal.Signals(-status).name
        except ValueError:
            name = f"signal {-status}"
        hint = " (often: the machine ran out of memory)" if -status == signal.SIGKILL else ""
        aborted = -status == signal.SIGABRT
        cause = f"its process was killed by {name}{hint}"
        return Failure(rank, now, 128 - status, cause, died=not aborted, aborted=aborted)
    if status == 0:
        return of_leaving(rank, status)
    return Failure(rank, now, status, _leaving(status))


def is_leaving(status: int, done: bool) -> bool:
    """Whether this is how a process ends that has nothing more to do. ``done``: it had come to its work's end."""
    return status == 0 or (status == UNFLUSHED and done)


def of_leaving(rank: int, status: int) -> Failure:
    """Describe a rank that had nothing more to do, though others could not do without it."""
    cause = f"ended early: {_leaving(status)} before its work was done"
    return Failure(rank, time.monotonic(), status or 1, cause, left_early=True)


def _leaving(status: int) -> str:
    hint = " (Python's own: sys.stdout or sys.stderr could not be flushed)" if status == UNFLUSHED else ""
    return f"its process left with exit code {status}{hint}"


def explained(failure: Failure, written: str) -> Failure:
    """Add to a rank that aborted why, from the end of what it wrote to its standard error."""
    lines = [line.strip() for line in written.splitlines() if line.strip()]
    if not failure.aborted or not lines:
        return failure
    # What an exception of C++ that nobody caught says; stacks may follow it.
    reason = next((line for line in reversed(lines) if line.startswith("what():")), lines[-1])
    reason = reason.removeprefix("what():").strip()
    lost = any(sign in reason for sign in _LOST_DEVICE)
    return replace(failure, cause=f"{failure.cause}: {reason}", died=lost)


def of_message(rank: int, kind: str, value: Any) -> Failure:
    """Describe a failure from what was heard: the rank's own account, or the status that it ended with."""
    return value if kind == "failure" else of_exit_status(rank, value)


def to_error(failure: Failure) -> KwayError:
    """Make the exception that the parent raises: kway's own as they were, all others a ``RankError``."""
    if failure.error is not None:
        from kway.launch.payload import load

        try:
            error: Any = load(failure.error)
        except Exception:  # fall back to the text
            error = None
        if isinstance(error, KwayError):
            return error
    return RankError(failure.rank, failure.exit_code, failure.cause, failure.traceback, failure.died)
