"""How long a step takes: wall time of windows of steps, the device waited for at both ends."""

import time
from collections.abc import Callable, Iterable, Iterator
from itertools import count
from statistics import median_low
from typing import Any, TypeVar

import torch

from kway.launch.status import STEP, Status
from kway.training.idle import idle_of
from kway.training.straggler import OwnWork, Work

T = TypeVar("T")
WINDOW = 10
WARM_UP = 3
# Seconds that a window lasts at least on a GPU, which is waited for at its ends: that costs more than a fast step.
LASTS = 0.25


class StepClock:
    """Times windows of steps, and says on ``status`` which step this rank is at.

    ``pause`` and ``resume`` leave evaluation out of a window, and ``leave_out`` saving, without waiting for the device.

    The first steps of a run pay for what happens once (memory pools, algorithm choice) and are left out.
    """

    def __init__(self, device: torch.device, status: Status | None = None) -> None:
        self.device = device
        self.status = Status() if status is None else status
        # Of a GPU it would say how fast the host gives it work.
        self._own = OwnWork(self.status) if device.type == "cpu" else None
        self.windows: list[float] = []
        self._idle = idle_of(device)
        self._lasts = LASTS if device.type == "cuda" else 0.0
        self._to_skip, self._steps, self._elapsed = WARM_UP, 0, 0.0
        self._since: float | None = None
        self._stops: list[Callable[[], float]] = []

    def synchronise(self) -> float:
        """Wait for the device and return the time in seconds."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def resume(self) -> None:
        """Start or go on measuring."""
        self._since = self.synchronise()

    def pause(self) -> None:
        """Stop measuring; the open window is kept."""
        if self._since is not None:
            self._elapsed += self.synchronise() - self._since - sum(stop() for stop in self._stops)
        self._since = None
        self._stops.clear()

    def leave_out(self, stop: Callable[[], float]) -> None:
        """Leave out of the open window the seconds that ``stop`` returns once the device has been waited for."""
        if self._since is not None:
            self._stops.append(stop)

    def stands(self) -> None:
        """Training is about to stand still for what ``leave_out`` will leave out."""

    def step(self, samples: int = 0) -> None:
        """Count one step with ``samples`` on this rank, and close the window where it is full."""
        if self._own is not None:
            self._own.end(samples)
        if self._to_skip:
            self._to_skip -= 1
            if not self._to_skip:
                self._elapsed = 0.0
                self._stops.clear()
                self.resume()
            return
        self._steps += 1
        if self._steps >= WINDOW and self._so_far() >= self._lasts:
            self.pause()
            self.windows.append(self._elapsed / self._steps)
            self._steps, self._elapsed = 0, 0.0
            self.resume()

    def _so_far(self) -> float:
        """Return how long the open window is by the host's time, which may run ahead of the device's."""
        return self._elapsed + (time.perf_counter() - self._since if self._since is not None else 0.0)

    def waited(self, items: Iterable[T], steps: int = 0) -> Iterator[T]:
        """Pass items on, adding up the time that the device waited. ``steps``: those taken before the first."""
        source = iter(items)
        for step in count(steps + 1):
            self.status.at("input", step)
            if self._own is not None:
                self._own.begin()
            self._idle.wait_begins()
            start = time.perf_counter()
            try:
                item = next(source)
            except StopIteration:
                return
            self._idle.wait_ends(time.perf_counter() - start)
            self.status.at(STEP)
            yield item

    def work(self) -> Work | None:
        """Return what this rank does in a step; ``None`` after too few steps, and on a GPU, whose time it is not."""
        return None if self._own is None else self._own.work()

    def timeline(self) -> tuple[dict[str, Any] | None, list[str]]:
        """Return what was recorded of single steps for the record, if that was asked for, and lines for the user."""
        return None, []

    def close(self) -> None:
        """Leave nothing behind."""

    @property
    def step_s(self) -> float | None:
        """The median over windows of the time of one step, in seconds; ``None`` after too few steps.

        Of two in the middle the shorter one: the longer one of a short run may hold what is compiled. Once the clock is
        paused, what is left of at least as many steps is a window too.
        """
        left = [self._elapsed / self._steps] if self._steps >= WINDOW and self._since is None else []
        return median_low([*self.windows, *left]) if self.windows or left else None

    @property
    def input_wait_s(self) -> float:
        """How long the device waited for batches, in seconds: on a GPU, only while it had nothing else to do."""
        return self._idle.seconds()
