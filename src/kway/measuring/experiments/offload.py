"""From which size on a GPU pays, where the data begins and ends in CPU memory."""

from collections.abc import Callable, Sequence

import torch

from kway.measuring.bench import Bench, Row
from kway.measuring.budget import Seconds
from kway.measuring.experiment import Experiment
from kway.measuring.figure import Figure
from kway.measuring.fit import crossing
from kway.measuring.reference import normal
from kway.measuring.timer import Work
from kway.measuring.work import lazily, waited, waiter
from kway.units import seconds_text

TOTAL, PARTS = "product from CPU memory", "parts of an offload"
ALLOCATE, COPY_IN, PRODUCT, COPY_OUT = "allocate", "copy in", "product", "copy out"


def on_cpu(size: int) -> Work:
    """Return the product on the CPU, into memory that is there."""

    def make() -> Work:
        a, b = (normal("cpu", torch.float32, size, size) for _ in range(2))
        out = torch.empty_like(a)
        return waited(lambda: torch.mm(a, b, out=out), waiter("cpu"))

    return lazily(make)


def on_gpu(device: str, size: int, part: str = "") -> Work:
    """Return all that a product on a GPU takes, or one ``part`` of it, until it is done.

    Memory of a GPU comes from torch's cache, which is warm, as in a loop; pageable CPU memory at both ends.
    """

    def make() -> Work:
        # Made where that takes no time: a CPU draws millions of numbers slowly.
        a, b = (normal(device, torch.float32, size, size).cpu() for _ in range(2))
        # Written once: the first touch of memory is no part of a copy.
        out = torch.zeros_like(a)
        held = [torch.empty_like(a, device=device) for _ in range(3)]
        held[0].copy_(a)
        held[1].copy_(b)
        torch.mm(held[0], held[1], out=held[2])

        def allocate() -> list[torch.Tensor]:
            return [torch.empty(size, size, device=device) for _ in range(3)]

        def copy_in() -> None:
            held[0].copy_(a)
            held[1].copy_(b)

        def whole() -> None:
            left, right, product = allocate()
            left.copy_(a)
            right.copy_(b)
            torch.mm(left, right, out=product)
            out.copy_(product)

        calls: dict[str, Callable[[], object]] = {
            "": whole,
            ALLOCATE: allocate,
            COPY_IN: copy_in,
            PRODUCT: lambda: torch.mm(held[0], held[1], out=held[2]),
            COPY_OUT: lambda: out.copy_(held[2]),
        }
        return waited(calls[part], waiter(device))

    return lazily(make)


def run(bench: Bench) -> list[Figure]:
    """Measure the whole on CPU and first GPU, its parts on the GPU, and where the two cross."""
    sizes, gpu = bench.sizes["n"], bench.gpus[0]
    cpu = [_row(TOTAL, {"device": "cpu", "n": n}, on_cpu(n), "cpu", n) for n in sizes]
    whole = [_row(TOTAL, {"device": gpu, "n": n}, on_gpu(gpu, n), "whole", n) for n in sizes]
    parts = [
        _row(PARTS, {"device": gpu, "part": part, "n": n}, on_gpu(gpu, n, part), part, n)
        for part in (ALLOCATE, COPY_IN, PRODUCT, COPY_OUT)
        for n in sizes
    ]
    on_gpus = bench.measure(whole, gpu, 0.4) + bench.measure(parts, gpu, 0.6)
    figures = bench.measure(cpu, "cpu", 1.0) + on_gpus
    return figures + compared(bench, gpu, figures)


def _row(name: str, parameters: dict[str, object], run: Work, family: str, size: int) -> Row:
    # Products grow with the cube, copies with the square: the cube is what decides whether there is time for one.
    return Row(name, parameters, run, family=family, work=float(size) ** (2 if family != "cpu" else 3))


def compared(bench: Bench, gpu: str, figures: Sequence[Figure]) -> list[Figure]:
    """Return the size from which the GPU takes less time, with what takes the GPU's time at the largest size."""
    times: dict[str, dict[int, float]] = {"cpu": {}, gpu: {}}
    for figure in figures:
        if figure.name == TOTAL:
            times[figure.parameters["device"]][figure.parameters["n"]] = figure.value
    sizes = sorted(times["cpu"].keys() & times[gpu].keys())
    parts = {
        figure.parameters["part"]: figure.value
        for figure in figures
        if figure.name == PARTS and sizes and figure.parameters["n"] == sizes[-1]
    }
    if parts:
        said = ", ".join(f"{part} {seconds_text(seconds)}" for part, seconds in parts.items())
        bench.notes.append(f"{TOTAL} on {gpu}, n = {sizes[-1]}: {said}")
    at = crossing(sizes, [times["cpu"][n] for n in sizes], [times[gpu][n] for n in sizes])
    if at is None:
        bench.notes.append(
            f"{TOTAL}: {gpu} takes no less time than the CPU at any size up to {max(sizes, default=0)}"
        )
        return []
    make = bench.maker()
    return [make.computed(f"{TOTAL}: crossing", {"marks": TOTAL, "device": gpu}, "n", at)]


EXPERIMENT = Experiment(
    name="offload",
    summary="allocate, copy in, matrix product, copy out: the size from which a GPU pays",
    run=run,
    quick={"n": (32, 64, 128, 256, 512, 1024, 2048)},
    full={"n": (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)},
    quick_s=Seconds(0.0, cpu=2.0, gpu=1.5),
    full_s=Seconds(0.0, cpu=20.0, gpu=20.0),
    needs=("cpu", "cuda"),
    order=30,
)
