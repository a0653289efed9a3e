"""How long training stood still for something between two steps: on a device, not on the host.

A GPU still works through what it was given while the host prepares a save, so it is not waited for first. Training has
lost only what lies between the end of that work and the moment from which the next step may begin.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch

from kway.training.idle import Point, point_on

# Returns how many seconds a stop took. The device may be waited for.
Stop = Callable[[], float]


class Held(Protocol):
    """Keeps how long each of a number of stops took."""

    def begins(self) -> None:
        """All that the device has to do for the steps so far has been given to it."""

    def so_far(self) -> float:
        """Return how long the stop that has begun has taken. The device is waited for."""

    def ends(self) -> Stop:
        """What is given to the device from now on belongs to the next step; return this stop."""

    def seconds(self) -> list[float]:
        """Return how long each stop took, in order. The device may be waited for."""


class HostHeld:
    """Of a device that is the host itself: it stands still for as long as the host does something else."""

    def __init__(self) -> None:
        self._begun, self._seconds = 0.0, list[float]()

    def begins(self) -> None:
        """Start the clock."""
        self._begun = time.perf_counter()

    def so_far(self) -> float:
        """Read the clock."""
        return time.perf_counter() - self._begun

    def ends(self) -> Stop:
        """Stop the clock."""
        seconds = time.perf_counter() - self._begun
        self._seconds.append(seconds)
        return lambda: seconds

    def seconds(self) -> list[float]:
        """Return what the clock read, stop by stop."""
        return list(self._seconds)


class DeviceHeld:
    """Of a device that works by itself: by its own clock. It is not waited for before ``seconds`` is asked for."""

    def __init__(self, point: Callable[[], Point]) -> None:
        self._make = point
        self._stops: list[Stop] = []
        self._end: Point | None = None

    def begins(self) -> None:
        """Set a point behind the steps so far."""
        self._end = self._make()
        self._end.record()

    def so_far(self) -> float:
        """Set a point behind all that the device has been given, and wait for it."""
        assert self._end is not None, "so_far() without begins()"
        now = self._make()
        now.record()
        return _between(self._end, now)

    def ends(self) -> Stop:
        """Set a point before the next step: at once where the device has run dry, else behind what it was given."""
        assert self._end is not None, "ends() without begins()"
        now = self._make()
        now.record()
        self._stops.append(partial(_between, self._end, now))
        return self._stops[-1]

    def seconds(self) -> list[float]:
        """Return what lies between the points, stop by stop."""
        return [stop() for stop in self._stops]


def _between(end: Point, now: Point) -> float:
    now.synchronize()
    return end.elapsed_time(now) / 1000


def held_on(device: torch.device) -> Held:
    """Return what measures how long training on ``device`` stands still."""
    return DeviceHeld(lambda: point_on(device)) if device.type == "cuda" else HostHeld()
