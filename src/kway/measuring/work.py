"""How work is repeated, and how one waits for it: the mechanism below the timer.

A CPU is done when a call returns. A GPU is not: a call only puts work into its queue. There, one waits for all of it
before the clock starts and before it stops, or has the GPU itself record events before and after the work.
"""

import time
from collections.abc import Callable

import torch

from kway.measuring.timer import Clock, Work

Call = Callable[[], object]
# How many launches are timed in one go: a GPU's queue takes a thousand before the call itself has to wait.
QUEUE = 500


def waiter(device: str | torch.device) -> Call:
    """Return what waits until a device has done all it was given: nothing, on a CPU."""
    place = torch.device(device)
    if place.type == "cuda":
        return lambda: torch.cuda.synchronize(place)
    return lambda: None


def waited(call: Call, wait: Call, clock: Clock = time.perf_counter) -> Work:
    """Make work of a call: n of them in a row, between two waits. For what the CPU takes part in."""

    def run(count: int) -> float:
        wait()
        begun = clock()
        for _ in range(count):
            call()
        wait()
        return clock() - begun

    return run


def each_waited(call: Call, wait: Call, clock: Clock = time.perf_counter) -> Work:
    """Make work of a call after each of which is waited: what one costs where the next one needs its result."""

    def both() -> None:
        call()
        wait()

    return waited(both, wait, clock)


def launched(call: Call, wait: Call, clock: Clock = time.perf_counter, queue: int = QUEUE) -> Work:
    """Make work of a call whose end is not awaited: how long it takes to launch it.

    The clock stands still after each ``queue`` launches until all are done, so that no launch waits for room.
    """

    def run(count: int) -> float:
        took = 0.0
        for start in range(0, count, queue):
            wait()
            begun = clock()
            for _ in range(min(queue, count - start)):
                call()
            took += clock() - begun
        wait()
        return took

    return run


def on_stream(call: Call, device: torch.device, before: Call = lambda: None) -> Work:
    """Make work of a call that puts everything on the current stream of a GPU: the GPU's own clock counts.

    ``before``: what is put there first, and does not count.
    """

    def run(count: int) -> float:
        with torch.cuda.device(device):
            start, stop = _event(), _event()
            torch.cuda.synchronize(device)
            before()
            start.record()
            for _ in range(count):
                call()
            stop.record()
            stop.synchronize()
            return float(start.elapsed_time(stop)) / 1e3

    return run


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def computed(call: Call, device: str | torch.device) -> Work:
    """Make work of a call that computes on ``device``: by the GPU's events there, else by the CPU's clock."""
    place = torch.device(device)
    return on_stream(call, place) if place.type == "cuda" else waited(call, waiter(place))


def lazily(make: Callable[[], Work]) -> Work:
    """Return work that is made when it is first done: what is left out takes no memory."""
    held: list[Work] = []

    def run(count: int) -> float:
        if not held:
            held.append(make())
        return held[0](count)

    return run
