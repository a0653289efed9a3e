"""Batches on their way to the device while it computes: two steps ahead, on a stream of their own."""

from collections import deque
from collections.abc import Iterator
from typing import Any, TypeVar

import torch

from kway.data.side_stream import Mark, Side
from kway.data.structure import mapped

Tensor = torch.Tensor
Item = TypeVar("Item")
DEPTH = 2
# Batches handed out that the device may still have to compute: each takes its memory, and a host that only starts
# recorded steps would be scores of them ahead.
BACKLOG = 8
_END = object()


class Lane:
    """Takes tensors to a device, item by item, through pinned memory that is written again and again.

    ``slots`` items have memory of their own: it is written anew when its copies are done, long after, where the
    device keeps up. Where no memory can be pinned, copies are made from where the tensors lie.
    """

    def __init__(self, side: Side, slots: int = DEPTH + 1) -> None:
        self._side = side
        self._slots = [_Slot() for _ in range(slots)]
        self._turn, self._pins = 0, True
        self._begun: deque[Mark] = deque()

    def send(self, item: Any) -> tuple[Any, Mark, list[Tensor]]:
        """Begin to copy the tensors of a nested structure. Return it with them in their place, and what ``arrived``
        needs: the end of the copies, and the new tensors.
        """
        slot = self._slots[self._turn]
        self._turn = (self._turn + 1) % len(self._slots)
        slot.begin()
        found: list[Tensor] = []

        def one(source: Tensor) -> Tensor:
            if not self._side.takes(source):
                return source
            there = self._side.empty_like(source)
            if source.numel():
                self._side.copy(there, self._staged(source, there, slot))
            found.append(there)
            return there

        moved = mapped(item, one)
        slot.mark = self._side.mark()
        return moved, slot.mark, found

    def arrived(self, mark: Mark, tensors: list[Tensor]) -> None:
        """Let what computes from now on wait for the copies; see ``send``.

        The host waits where the device has not yet come to what was handed out ``BACKLOG`` items ago.
        """
        self._begun.append(self._side.reached())
        if len(self._begun) > BACKLOG:
            self._begun.popleft().synchronize()
        self._side.arrived(mark, tensors)

    def _staged(self, source: Tensor, like: Tensor, slot: "_Slot") -> Tensor:
        """Return the source in memory that the device can read by itself, once the side stream gets there."""
        if not self._side.is_on_host(source):
            self._side.wait_for_producer(source)
            slot.kept.append(source)
            return source
        # Pinned memory of the data set's own is copied as well: it may be written again before the device reads it.
        if not self._pins:
            slot.kept.append(source)
            return source
        try:
            staged = slot.room(like, self._side)
        except RuntimeError:
            self._pins = False  # the system gives no such memory, or no more of it
            return source
        return staged.copy_(source)


class _Slot:
    """Pinned memory for the tensors of one item, and what is read until ``mark``."""

    def __init__(self) -> None:
        self.mark: Mark | None = None
        self.kept: list[Tensor] = []
        self._memory: list[Tensor] = []
        self._used = 0

    def begin(self) -> None:
        """Begin anew, when all copies from here are done."""
        if self.mark is not None:
            self.mark.synchronize()
        self.kept.clear()
        self._used = 0

    def room(self, like: Tensor, side: Side) -> Tensor:
        """Return pinned memory of the shape, strides and type of a dense tensor."""
        size = like.numel() * like.element_size()
        if self._used == len(self._memory) or self._memory[self._used].numel() < size:
            # Rounded up: batches of texts differ in length, and pinning takes milliseconds.
            self._memory[self._used : self._used + 1] = [side.pinned(1 << (size - 1).bit_length())]
        memory = self._memory[self._used]
        self._used += 1
        return memory[:size].view(like.dtype).as_strided(like.size(), like.stride())


def ahead(items: Iterator[Item], lane: Lane, depth: int = DEPTH) -> Iterator[Item]:
    """Yield ``items``, nested structures, with their tensors on the lane's device: ``depth`` more are on their way.

    In order. What ``items`` raises comes out behind the items before it. However this ends, ``items`` is closed.
    A lane needs ``depth`` + 1 slots.
    """
    waiting: deque[tuple[Item, Mark, list[Tensor]]] = deque()
    failure: Exception | None = None
    more = True
    try:
        while True:
            while more and len(waiting) <= depth:
                try:
                    item: Any = next(items, _END)
                except Exception as error:
                    failure, more = error, False
                    break
                if item is _END:
                    more = False
                else:
                    waiting.append(lane.send(item))
                    del item  # what is read next needs its memory
            if not waiting:
                break
            moved, mark, tensors = waiting.popleft()
            lane.arrived(mark, tensors)
            yield moved
            del moved, tensors  # a batch that nobody else wants
        if failure is not None:
            raise failure
    finally:
        waiting.clear()
        failure = None  # its traceback holds this frame
        close = getattr(items, "close", None)
        if close is not None:
            close()
