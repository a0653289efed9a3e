"""What single ranks ask of all of them while they train, and the step after which all do it.

Each rank sends its wishes along with its gradients (``StepCore.asked``), so that every rank learns of them with the
same step and no collective is added. On a GPU they are read some steps later, when they have long arrived: the
device is not waited for.
"""

from collections import deque
from collections.abc import Sequence

import torch

from kway.launch.stall import names
from kway.step.outcome import Outcome
from kway.world import StopRequest

STOP, SAVE = 1, 2
LAG = 8


class Requests:
    """Reads what was asked for, at the same steps on all ranks. Who asks goes on asking until it is done.

    On a CPU every step is looked at. On a GPU one in LAG steps is, LAG steps later.
    """

    def __init__(self, device: torch.device) -> None:
        self._lag = LAG if device.type == "cuda" else 0
        self._open: deque[tuple[int, torch.Tensor, torch.cuda.Event | None]] = deque()
        self._steps, self._saved = 0, 0
        # One more is open while the oldest is read.
        self._read_back = _ReadBack(2)

    def after(self, outcome: Outcome, own: int) -> int:
        """Return what all ranks do now, after the step of ``outcome``: some of the bits STOP and SAVE.

        ``own``: what this rank asked for in that step. A SAVE that was asked for while one was under way is
        answered by that one.
        """
        self._steps += 1
        due = bool(self._open) and self._steps - self._open[0][0] >= self._lag
        if self._lag and self._steps % self._lag and not due and not own:
            return 0  # without a look at the outcome, which may have to be taken apart for it
        if outcome.asked is None:
            return own
        if self._lag == 0 or self._steps % self._lag == 0:
            self._open.append((self._steps, *self._read_back.send(outcome.asked)))
        if not self._open or self._steps - self._open[0][0] < self._lag:
            return 0
        sent, values, event = self._open.popleft()
        if event is not None:
            event.synchronize()
        found = 0
        for value in values.tolist():
            found |= int(value)
        if found & SAVE and sent <= self._saved:
            found &= ~SAVE
        if found & SAVE:
            self._saved = self._steps
        return found


def who_asked(stops: Sequence[StopRequest]) -> str:
    """Name the signal that a run is stopped by, from what each rank heard, and the ranks where only they got it."""
    heard = {rank: stop for rank, stop in enumerate(stops) if stop.by}
    above = [stop.by for stop in heard.values() if not stop.direct]
    by = (above or [stop.by for stop in heard.values()] or ["another rank"])[0]
    if above or len(heard) == len(stops) or not heard:
        return by
    return f"{by} to {names([*heard])}"


class _ReadBack:
    """Pinned memory, used again and again, through which small tensors come to the host: ``slots`` at a time."""

    def __init__(self, slots: int) -> None:
        self._slots: list[tuple[torch.Tensor, torch.cuda.Event] | None] = [None] * slots
        self._turn = 0

    def send(self, asked: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event | None]:
        """Start to bring a tensor to the host; return where it will be, and what tells that it is there."""
        if not asked.is_cuda:
            return asked, None
        slot = self._slots[self._turn]
        if slot is None or slot[0].shape != asked.shape or slot[0].dtype != asked.dtype:
            here = torch.empty(asked.shape, dtype=asked.dtype, pin_memory=True)
            slot = here, torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._slots[self._turn] = slot
        self._turn = (self._turn + 1) % len(self._slots)
        slot[0].copy_(asked, non_blocking=True)
        slot[1].record(torch.cuda.current_stream(asked.device))
        return slot
