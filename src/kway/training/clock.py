"""How long a step takes: wall time of windows of steps, the device waited for at both ends."""

import time
from collections.abc import Iterable, Iterator
from itertools import count
from statistics import median
from typing import TypeVar

import torch

from kway.launch.status import STEP, Status
from kway.training.straggler import OwnWork, Work

T = TypeVar("T")
WINDOW = 10
WARM_UP = 3


class StepClock:
    """Times windows of steps, and says on ``status`` which step this rank is at.

    ``pause`` and ``resume`` leave evaluation and saving out of a window.

    The first steps of a run pay for what happens once (memory pools, algorithm choice) and are left out.
    """

    def __init__(self, device: torch.device, status: Status | None = None) -> None:
        self.device = device
        self.status = Status() if status is None else status
        self.own = OwnWork(self.status)
        self.windows: list[float] = []
        self.input_wait_s = 0.0
        self._to_skip, self._steps, self._elapsed = WARM_UP, 0, 0.0
        self._since: float | None = None

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
            self._elapsed += self.synchronise() - self._since
        self._since = None

    def step(self, samples: int = 0) -> None:
        """Count one step with ``samples`` on this rank, and close the window where it is full."""
        self.own.end(samples)
        if self._to_skip:
            self._to_skip -= 1
            if not self._to_skip:
                self._elapsed = 0.0
                self.resume()
            return
        self._steps += 1
        if self._steps == WINDOW:
            self.pause()
            self.windows.append(self._elapsed / WINDOW)
            self._steps, self._elapsed = 0, 0.0
            self.resume()

    def waited(self, items: Iterable[T], steps: int = 0) -> Iterator[T]:
        """Pass items on, adding up the time that each took to come. ``steps``: those taken before the first."""
        source = iter(items)
        for step in count(steps + 1):
            self.status.at("input", step)
            self.own.begin()
            start = time.perf_counter()
            try:
                item = next(source)
            except StopIteration:
                return
            self.input_wait_s += time.perf_counter() - start
            self.status.at(STEP)
            yield item

    def work(self) -> Work | None:
        """Return what this rank does in a step; ``None`` after too few steps, and on a GPU, whose time it is not."""
        return self.own.work() if self.device.type == "cpu" else None

    @property
    def step_s(self) -> float | None:
        """The median over windows of the time of one step, in seconds; ``None`` without a whole window."""
        return median(self.windows) if self.windows else None
