"""CPU against GPU: an n x n matrix added to another in place, a thousand times, timed in two ways.

Synchronised: until the last addition is done. Launch only: until the last call returns, which on a GPU means that the
work is in its queue. The second clock is a common mistake; how much it hides is measured here.
"""

from collections.abc import Sequence

import torch

from kway.measuring.bench import Bench, Row
from kway.measuring.figure import Figure
from kway.measuring.fit import crossing
from kway.measuring.timer import Work
from kway.measuring.work import launched, lazily, waited, waiter
from kway.units import seconds_text

NAME = "in-place add, 1000 times"
TIMES = 1000
# Elements that a GPU adds in the time of a launch, about: what few of them take tells of many only with these.
BEGIN = 1 << 21
DONE, QUEUED = "synchronised", "launch only"


def rows(device: str, sizes: Sequence[int]) -> list[Row]:
    """Return the rows of a device. A CPU is done when a call returns: one way to time it is all there is."""
    if device == "cpu":
        note = "the time of one addition, times 1000: a sample holds as many as it takes to be long enough"
        return [
            Row(
                NAME,
                {"device": device, "clock": DONE, "n": size},
                _once(size),
                value=lambda seconds: TIMES * seconds,
                notes=(note,),
                family="cpu",
                work=float(size * size),
            )
            for size in sizes
        ]
    return [
        Row(
            NAME,
            {"device": device, "clock": clock, "n": size},
            _thousand(device, size, clock),
            family=clock,
            work=float(BEGIN + size * size) if clock == DONE else 0.0,
        )
        for clock in (DONE, QUEUED)
        for size in sizes
    ]


def _pair(device: str, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    # Zeros: what is added a million times must not grow beyond what a float holds.
    return torch.ones(size, size, device=device), torch.zeros(size, size, device=device)


def _once(size: int) -> Work:
    def make() -> Work:
        a, b = _pair("cpu", size)
        return waited(lambda: a.add_(b), waiter("cpu"))

    return lazily(make)


def _thousand(device: str, size: int, clock: str) -> Work:
    def make() -> Work:
        a, b = _pair(device, size)

        def call() -> None:
            for _ in range(TIMES):
                a.add_(b)

        wait = waiter(device)
        # After each thousand the queue is emptied, with the clock standing still, as where one looks at the result.
        return waited(call, wait) if clock == DONE else launched(call, wait, queue=1)

    return lazily(make)


def compared(bench: Bench, figures: Sequence[Figure]) -> list[Figure]:
    """Return from which n on the GPU takes less time, by each clock, with the difference explained in numbers."""
    found: list[Figure] = []
    cpu = _times(figures, "cpu", DONE)
    for gpu in bench.gpus[:1]:
        done, queued = _times(figures, gpu, DONE), _times(figures, gpu, QUEUED)
        for clock, times in ((DONE, done), (QUEUED, queued)):
            sizes = sorted(cpu.keys() & times.keys())
            at = crossing(sizes, [cpu[n] for n in sizes], [times[n] for n in sizes])
            if at is None:
                bench.notes.append(f"{NAME}: {gpu} takes no less time than the CPU at any n ({clock})")
                continue
            parameters = {"marks": NAME, "device": gpu, "clock": clock}
            found.append(bench.maker().computed(f"{NAME}: crossing", parameters, "n", at))
        if both := sorted(done.keys() & queued.keys()):
            bench.notes.append(explained(both[-1], done[both[-1]], queued[both[-1]]))
    if not bench.gpus:
        bench.notes.append(f"{NAME}: no GPU here, so there is no size from which one takes less time")
    return found


def explained(size: int, done_s: float, queued_s: float) -> str:
    """Say what a clock that does not wait for the GPU has measured."""
    ratio = done_s / queued_s
    if ratio < 1.5:
        return (
            f"{NAME}: at n = {size} both clocks read about {seconds_text(done_s)}: the GPU keeps up with the launches, "
            "and launching is what takes the time"
        )
    return (
        f"{NAME}: at n = {size} they take {seconds_text(done_s)}; a clock that is not synchronised reads "
        f"{seconds_text(queued_s)}, {ratio:.0f} times less: a call returns when its work is in the GPU's queue, "
        f"{seconds_text(queued_s / TIMES)} a launch whatever n is, and the GPU works on"
    )


def _times(figures: Sequence[Figure], device: str, clock: str) -> dict[int, float]:
    return {
        figure.parameters["n"]: figure.value
        for figure in figures
        if figure.name == NAME
        and (figure.parameters["device"], figure.parameters["clock"]) == (device, clock)
    }
