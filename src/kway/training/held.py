"""How long training stood still for something between two steps: on a device, not on the host.

A GPU still works through what it was given while the host prepares a save. Training has lost only what lies between
the end of that work and the moment from which the next step may begin.
"""

import time
from collections.abc import Callable
from typing import Protocol

import torch

from kway.training.idle import Point, point_on


class Held(Protocol):
    """Keeps how long each of a number of stops took."""

    def begins(self) -> None:
        """All that the device has to do for the steps so far has been given to it."""

    def ends(self) -> None:
        """What is given to the device from now on belongs to the next step."""

    def seconds(self) -> list[float]:
        """Return how long each stop took, in order. The device may be waited for."""


class HostHeld:
    """Of a device that is the host itself: it stands still for as long as the host does something else."""

    def __init__(self) -> None:
        self._begun, self._seconds = 0.0, list[float]()

    def begins(self) -> None:
        """Start the clock."""
        self._begun = time.perf_counter()

    def ends(self) -> None:
        """Stop the clock."""
        self._seconds.append(time.perf_counter() - self._begun)

    def seconds(self) -> list[float]:
        """Return what the clock read, stop by stop."""
        return list(self._seconds)


class DeviceHeld:
    """Of a device that works by itself: by its own clock. It is not waited for before ``seconds`` is asked for."""

    def __init__(self, point: Callable[[], Point]) -> None:
        self._make = point
        self._points: list[tuple[Point, Point]] = []
        self._end: Point | None = None

    def begins(self) -> None:
        """Set a point behind the steps so far."""
        self._end = self._make()
        self._end.record()

    def ends(self) -> None:
        """Set a point before the next step: at once where the device has run dry, else behind what it was given."""
        assert self._end is not None, "ends() without begins()"
        now = self._make()
        now.record()
        self._points.append((self._end, now))

    def seconds(self) -> list[float]:
        """Return what lies between the points, stop by stop."""
        for _, now in self._points[-1:]:
            now.synchronize()
        return [end.elapsed_time(now) / 1000 for end, now in self._points]


def held_on(device: torch.device) -> Held:
    """Return what measures how long training on ``device`` stands still."""
    return DeviceHeld(lambda: point_on(device)) if device.type == "cuda" else HostHeld()
