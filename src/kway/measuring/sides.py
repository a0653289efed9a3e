"""Products and all-reduces that a rank does at once, and each of them alone."""

import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from kway.measuring.timer import Work
from kway.measuring.two_devices import multiplier
from kway.measuring.work import waited, waiter

COMPUTE, COMMUNICATE = "products alone", "all-reduce alone"
BOTH, UNDER = "both at once", "products, all-reduce beside them"
WAYS = (COMPUTE, COMMUNICATE, BOTH, UNDER)
PRODUCTS = 10


class Sides:
    """The two things that a rank does at once: ``PRODUCTS`` products, and some all-reduces of one size."""

    def __init__(self, device: str, size: int, count: int) -> None:
        self._device = torch.device(device)
        self.multiply = multiplier(device, size, PRODUCTS)
        self._tensor = torch.zeros(count // 4, device=device)
        self.times = 1
        self._wait = waiter(device)

    def begin(self, fold: int = 1) -> list[Any]:
        """Start the all-reduces, ``fold`` times as many; they go on by themselves."""
        return [dist.all_reduce(self._tensor, async_op=True) for _ in range(fold * self.times)]

    def communicate(self) -> None:
        """Do the all-reduces."""
        _finish(self.begin())

    def both(self) -> None:
        """Do both at once. What is begun first has begun when the products are launched."""
        begun = self.begin()
        self.multiply()
        _finish(begun)

    def work(self, way: str) -> Work:
        """Return the work of a way."""
        if way == UNDER:
            return self._under
        calls = {COMPUTE: self.multiply, COMMUNICATE: self.communicate, BOTH: self.both}
        return waited(calls[way], self._wait)

    def _under(self, count: int) -> float:
        """Time the products alone, from when the all-reduces have been begun until the products are done."""
        took = 0.0
        for _ in range(count):
            self._wait()
            # Twice as many, so that they go on until the products are done.
            begun = self.begin(fold=2)
            started = time.perf_counter()
            self.multiply()
            if self._device.type == "cuda":
                # The current stream has the products only: the wait is for them, not for the all-reduces.
                torch.cuda.current_stream(self._device).synchronize()
            took += time.perf_counter() - started
            _finish(begun)
        self._wait()
        return took


def _finish(begun: Sequence[Any]) -> None:
    for each in begun:
        each.wait()
