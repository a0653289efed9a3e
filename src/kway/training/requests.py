"""What single ranks ask of all of them while they train, and the step after which all do it.

Each rank sends its wishes along with its gradients (``StepCore.asked``), so that every rank learns of them with the
same step and no collective is added. On a GPU they are read some steps later, when they have long arrived: the
device is not waited for.
"""

from collections import deque

import torch

from kway.step.core import Outcome

STOP, SAVE = 1, 2
LAG = 8


class Requests:
    """Reads what was asked for, step by step, in the same way on all ranks."""

    def __init__(self, device: torch.device) -> None:
        self._lag = LAG if device.type == "cuda" else 0
        self._open: deque[tuple[torch.Tensor, torch.cuda.Event | None]] = deque()
        self._quiet = 0
        # One more is open while the oldest is read.
        self._read_back = _ReadBack(self._lag + 1)

    def after(self, outcome: Outcome, own: int) -> int:
        """Return what all ranks do now, after the step of ``outcome``: some of the bits STOP and SAVE.

        ``own``: what this rank asked for in that step. A SAVE that was asked for while one was under way is
        answered by that one.
        """
        if outcome.asked is None:
            found = own
        else:
            self._open.append(self._read_back.send(outcome.asked))
            if len(self._open) <= self._lag:
                return 0
            values, event = self._open.popleft()
            if event is not None:
                event.synchronize()
            found = 0
            for value in values.tolist():
                found |= int(value)
        if self._quiet:
            self._quiet -= 1
            return found & ~SAVE
        self._quiet = self._lag if found & SAVE else 0
        return found


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
