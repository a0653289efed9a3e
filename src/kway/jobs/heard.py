"""What data or a model raise on one rank while it judges is raised on all: none waits for one that has gone on."""

import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

import torch

from kway.comm.group import Group
from kway.comm.said import said
from kway.data.share import Share
from kway.errors import KwayError, RankError, line_of
from kway.launch.own_frames import from_users_code

# How long a rank that failed waits for the others before it says so: what it raises may never come out.
_SILENT_S = 2.0


class Heard:
    """Open while one rank of ``group`` judges ``shares``: an error on one rank then leaves it on all of them.

    A rank that raises gets its own error, the others get it too where it is one of kway's, else a ``RankError`` that
    names the rank and the error. Ranks meet for that at the end of the data, and behind the first batch that was read;
    behind each of them where the model communicates anyway. Only what is raised in the midst of that, and on GPUs in
    the first batch, goes at once: the others may be inside of something else. ``call``: one of ``COLLECTIVES``.
    """

    def __init__(self, group: Group, call: str, device: torch.device, shares: Iterator[Share]) -> None:
        self._group, self._call, self._device = group, call, device
        self.shares = shares if group.size == 1 else self._told(shares)
        # Whether the next thing that ranks do together is to meet here.
        self._meets_next = group.size > 1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception) and self._meets_next:
            with _said_late(self._group.rank, self._call, error):
                self._meet(error)

    def _told(self, shares: Iterator[Share]) -> Iterator[Share]:
        reads = computes = False
        # What a model does shows when it has run once.
        first = True
        while True:
            self._meets_next, before = not reads, self._begun()
            share = next(shares, None)
            reads = self._begun() > before
            if first or computes or share is None:
                self._meet(None)
            if share is None:
                self._meets_next = False
                return
            # An error between here and the next share is one of the model, the loss or a metric.
            # Of the first batch nobody knows whether the others wait in the model. On CPUs that ends the job within
            # seconds, where a barrier is paired with nothing else; on a GPU all would wait.
            known = not first or self._device.type == "cpu"
            self._meets_next, before = known and not computes, self._begun()
            yield share
            computes, first = self._begun() > before, False

    def _begun(self) -> int:
        """Return a number that grows with each collective of this rank, also with one of the user's own."""
        return self._group.trace.begun + said()

    def _meet(self, error: Exception | None) -> None:
        """Meet the others. Raises what another rank raised, where this one has nothing to raise."""
        self._meets_next = False
        if self._device.type == "cpu":
            # Paired with barriers only: see ``together``.
            self._group.barrier(self._call)
        failed = torch.tensor(error is not None, dtype=torch.int64, device=self._device)
        if not any(self._group.stack(failed).tolist()):
            return
        found = self._group.objects(None if error is None else _sent(self._group.rank, error))
        if error is None:
            raise next(other for other in found if other is not None)


def _sent(rank: int, error: Exception) -> KwayError:
    """Return what the other ranks raise. An error of the user's may not reach them, whatever it is derived from."""
    if isinstance(error, KwayError) and type(error).__module__.partition(".")[0] == "kway":
        return error
    return RankError(rank, 1, line_of(error), _lines(error))


def _lines(error: Exception) -> str:
    trace = error.__traceback__
    text = "".join(traceback.format_exception(from_users_code(error)))
    # It leaves this rank with all of its frames.
    error.__traceback__ = trace
    return text


@contextmanager
def _said_late(rank: int, call: str, error: Exception) -> Iterator[None]:
    """Say on standard error what was raised, where it has to wait for the others."""
    text = (
        f"{_lines(error)}kway: rank {rank} raised this in {call}, and waits until the other ranks hear of it"
    )

    def say() -> None:
        print(text, file=sys.stderr, flush=True)

    timer = threading.Timer(_SILENT_S, say)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
