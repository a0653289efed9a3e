"""Products on a GPU, each result copied out to the CPU: four ways to order computing and copying."""

from collections.abc import Sequence

import torch

from kway.measuring.bench import Bench, Row
from kway.measuring.figure import Figure
from kway.measuring.hidden import find, hidden_figure
from kway.measuring.reference import normal
from kway.measuring.timer import Work
from kway.measuring.work import launched, lazily, waited, waiter
from kway.units import seconds_text

RESULTS = 16
NAME = f"{RESULTS} products, each copied out"
HIDDEN = "copied out: hidden, of the shorter"
COMPUTE, PAGEABLE_COPY, PINNED_COPY = "products alone", "pageable copies alone", "pinned copies alone"
IN_TURN, NON_BLOCKING = "one after the other", "non_blocking"
PINNED, SIDE = "non_blocking, pinned", "pinned, on a side stream"
LAUNCHED = "on a side stream, launch only"
# From such a part of the time on, launching is what a way takes.
_MOSTLY = 0.8
# Each way with the copies alone that it makes.
WAYS = {IN_TURN: PAGEABLE_COPY, NON_BLOCKING: PAGEABLE_COPY, PINNED: PINNED_COPY, SIDE: PINNED_COPY}


def work(device: str, way: str, size: int) -> Work:
    """Return the work of a way. Two results on the GPU in turn, so that one is copied while the next one is made."""

    def make() -> Work:
        a, b = (normal(device, torch.float32, size, size) for _ in range(2))
        results = [torch.empty_like(a) for _ in range(2)]
        pinned = way in (PINNED, SIDE, LAUNCHED, PINNED_COPY)
        # Written once: the first touch of pageable memory is no part of a copy.
        hosts = [torch.zeros(size, size, pin_memory=pinned) for _ in range(2)]
        later = way not in (IN_TURN, PAGEABLE_COPY)
        computes, copies = way not in (PAGEABLE_COPY, PINNED_COPY), way != COMPUTE

        def in_line() -> None:
            for number in range(RESULTS):
                if computes:
                    torch.mm(a, b, out=results[number % 2])
                if copies:
                    hosts[number % 2].copy_(results[number % 2], non_blocking=later)

        if way == LAUNCHED:
            return launched(Beside(a, b, results, hosts), waiter(device), queue=1)
        side = Beside(a, b, results, hosts) if way == SIDE else None
        return waited(side or in_line, waiter(device))

    return lazily(make)


class Beside:
    """Copies results on a stream beside the one that computes them."""

    def __init__(
        self, a: torch.Tensor, b: torch.Tensor, results: list[torch.Tensor], hosts: list[torch.Tensor]
    ) -> None:
        self._ends = a, b
        self._results, self._hosts = results, hosts
        self._device = a.device
        self._side = torch.cuda.Stream(a.device)  # type: ignore[no-untyped-call]
        self._made = [torch.cuda.Event() for _ in results]  # type: ignore[no-untyped-call]
        self._copied = [torch.cuda.Event() for _ in results]  # type: ignore[no-untyped-call]

    def __call__(self) -> None:
        """Launch all of it. One event each tells when a result is there, and when its memory is free again."""
        with torch.cuda.device(self._device):
            current = torch.cuda.current_stream(self._device)
            for number in range(RESULTS):
                place = number % len(self._results)
                # One that was never recorded is no reason to wait.
                current.wait_event(self._copied[place])
                torch.mm(*self._ends, out=self._results[place])
                self._made[place].record(current)
                self._side.wait_event(self._made[place])
                with torch.cuda.stream(self._side):
                    self._hosts[place].copy_(self._results[place], non_blocking=True)
                self._copied[place].record(self._side)


def run(bench: Bench, part: float) -> list[Figure]:
    """Measure all ways on the first GPU; on none there is nothing to copy out of."""
    if not bench.gpus:
        bench.notes.append(f"{NAME}: no GPU here, so nothing is copied out")
        return []
    gpu = bench.gpus[0]
    ways = (COMPUTE, PAGEABLE_COPY, PINNED_COPY, *WAYS, LAUNCHED)
    rows = [
        Row(NAME, {"way": way, "n": size}, work(gpu, way, size), family=way, work=float(size) ** 2)
        for size in bench.sizes["n_copied"]
        for way in ways
    ]
    figures = bench.measure(rows, gpu, part)
    bench.notes += launch_bound(figures)
    return figures + compared(bench, figures)


def launch_bound(figures: Sequence[Figure]) -> list[str]:
    """Say at which sizes the side stream's time is that of launching from Python: nothing can be hidden behind it."""
    said = []
    for size in dict.fromkeys(figure.parameters["n"] for figure in figures):
        whole, launch = (find(figures, NAME, n=size, way=way) for way in (SIDE, LAUNCHED))
        if whole and launch and launch.value >= _MOSTLY * whole.value:
            said.append(
                f"{NAME}: at n = {size} launching takes {seconds_text(launch.value)} of the "
                f"{seconds_text(whole.value)} of the way {SIDE}: events and changes of "
                "stream cost more there than what they could hide"
            )
    return said


def compared(bench: Bench, figures: Sequence[Figure]) -> list[Figure]:
    """Return which part of the shorter one each way has hidden: of computing, or of copies of its kind of memory."""
    found = []
    for way, copies in WAYS.items():
        for size in dict.fromkeys(figure.parameters["n"] for figure in figures):
            compute, copied, both = (find(figures, NAME, n=size, way=each) for each in (COMPUTE, copies, way))
            if compute and copied and both:
                make = bench.maker(bench.readings[-1])
                found.append(hidden_figure(make, HIDDEN, {"way": way, "n": size}, compute, copied, both))
    return found
