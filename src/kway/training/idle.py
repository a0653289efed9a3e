"""How long a device had nothing to do because a batch had not come.

A GPU works through what it was given while the host reads the next batch. Only where it has run dry by the time
that the batch is there did anything wait for it.
"""

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import torch


class Point(Protocol):
    """A point in what a device has been given to do, as ``torch.cuda.Event`` with timing."""

    def record(self) -> None:
        """Set it behind all that the device has been given."""

    def query(self) -> bool:
        """Whether the device has reached it."""

    def synchronize(self) -> None:
        """Wait until the device reaches it."""

    def elapsed_time(self, other: Any) -> float:
        """Return the milliseconds from when this was reached to when ``other`` was."""


class Idle(Protocol):
    """Adds up the time in which a device was idle because input had not come."""

    def wait_begins(self) -> None:
        """All that the device has to do has been given to it; the next batch is asked for."""

    def wait_ends(self, waited_s: float) -> None:
        """The next batch is there, after so many seconds."""

    def seconds(self) -> float:
        """Return how long the device was idle, all in all. It may be waited for."""


class HostIdle:
    """Of a device that is the host itself: it is idle whenever it waits."""

    def __init__(self) -> None:
        self._total = 0.0

    def wait_begins(self) -> None:
        """Nothing is under way."""

    def wait_ends(self, waited_s: float) -> None:
        """Count all of it."""
        self._total += waited_s

    def seconds(self) -> float:
        """Return the sum."""
        return self._total


class DeviceIdle:
    """Of a device that works by itself. It is not waited for before ``seconds`` is asked for.

    ``point`` makes a point, which is used again and again.
    """

    def __init__(self, point: Callable[[], Point]) -> None:
        self._make = point
        self._end = point()
        self._free: list[Point] = []
        self._open: deque[tuple[Point, Point, float]] = deque()
        self._total = 0.0

    def wait_begins(self) -> None:
        """Set a point behind what the device has to do."""
        self._settle(wait=False)
        self._end.record()

    def wait_ends(self, waited_s: float) -> None:
        """Count what lies between the end of the device's work and now, at most the time waited: later, when the
        device has the figures. Nothing where it is still at work.
        """
        if not self._end.query():
            return
        now = self._point()
        now.record()
        self._open.append((self._end, now, waited_s))
        self._end = self._point()

    def seconds(self) -> float:
        """Return the sum."""
        self._settle(wait=True)
        return self._total

    def _settle(self, wait: bool) -> None:
        while self._open:
            end, now, waited_s = self._open[0]
            if wait:
                now.synchronize()
            elif not now.query():
                return
            self._total += min(waited_s, end.elapsed_time(now) / 1000)
            self._free += (end, now)
            self._open.popleft()

    def _point(self) -> Point:
        return self._free.pop() if self._free else self._make()


class _CudaPoint:
    """An event on the stream that is current on ``device``, which need not be the current device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    def record(self) -> None:
        self.event.record(torch.cuda.current_stream(self.device))

    def query(self) -> bool:
        return bool(self.event.query())  # type: ignore[no-untyped-call]

    def synchronize(self) -> None:
        self.event.synchronize()

    def elapsed_time(self, other: "_CudaPoint") -> float:
        return float(self.event.elapsed_time(other.event))


def point_on(device: torch.device) -> Point:
    """Return a point in what ``device``, a GPU, has to do on its current stream."""
    return _CudaPoint(device)


def idle_of(device: torch.device) -> Idle:
    """Return what measures the idle time of ``device``."""
    return DeviceIdle(lambda: point_on(device)) if device.type == "cuda" else HostIdle()
