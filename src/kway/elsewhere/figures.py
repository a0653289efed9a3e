"""Figures of one GPU and of the ways to it, from a description: products, memory, launches, copies."""

from collections.abc import Callable, Sequence
from itertools import permutations
from typing import Any

from kway.elsewhere.description import Machine
from kway.measuring.experiments.compute import EXPERIMENT as COMPUTE
from kway.measuring.experiments.copies import EXPERIMENT as COPIES
from kway.measuring.experiments.copies import NAME as COPY
from kway.measuring.experiments.copies import NON_BLOCKING, PAGEABLE, PINNED, parameters
from kway.measuring.figure import Figure, Maker
from kway.measuring.products import BEYOND_CACHES, DTYPES

# What a figure says of itself: none of these machines was ever measured.
NOTE = "an estimate from a description of the machine"


def maker(experiment: str) -> Maker:
    """Return what makes the figures of an experiment, each marked as an estimate."""
    return Maker(experiment, notes=(NOTE,))


def product_s(machine: Machine, dtype: str, size: int) -> float:
    """Return the seconds of a product of two ``size`` x ``size`` matrices: a launch, and 2 size^3 operations."""
    return float(machine.software["launch_s"] + 2 * size**3 / machine.flops(dtype))


def compute(machine: Machine) -> list[Figure]:
    """Return products, elementwise sums, memory and launches: of the first GPU all, of its node's others some.

    All GPUs are alike. Seconds are those of a launch and of what the operation computes, or moves, at the rate that is
    reached.
    """
    make, sizes = maker("compute"), COMPUTE.full
    launch, gpu = machine.software["launch_s"], machine.gpu
    figures = [
        make.computed(
            "matrix product", {"device": "cuda:0", "dtype": dtype, "n": n}, "FLOP/s",
            2 * n**3 / product_s(machine, dtype, n), limit=float(peak),
        )
        for dtype, peak in gpu["flops"].items()
        for n in sizes["products_gpu"]
    ]  # fmt: skip
    for dtype in gpu["flops"]:
        if dtype not in DTYPES or dtype == "tf32":
            continue
        moved = 3 * DTYPES[dtype].itemsize
        for count in sizes["elements_gpu"]:
            rate = count / (launch + moved * count / machine.memory_s)
            bound = gpu["memory_bandwidth"] / moved if moved * count >= BEYOND_CACHES else None
            at = {"device": "cuda:0", "dtype": dtype, "elements": count}
            figures.append(make.computed("elementwise add", at, "elements/s", rate, limit=bound))
    for device in devices(machine):
        figures += _of_each(machine, make, device)
    return figures


def devices(machine: Machine) -> list[str]:
    """List the GPUs of the first node."""
    return [f"cuda:{index}" for index in range(machine.gpus)]


def _of_each(machine: Machine, make: Maker, device: str) -> list[Figure]:
    size, software = COMPUTE.full["bytes_gpu"], machine.software
    taken = software["launch_s"] + 2 * size / machine.memory_s
    return [
        make.computed("launch", {"device": device, "until": "queued"}, "s", float(software["launch_s"])),
        make.computed("launch", {"device": device, "until": "done"}, "s", float(software["done_s"])),
        make.computed(
            "memory bandwidth", {"device": device, "bytes": size}, "B/s", 2 * size / taken,
            limit=float(machine.gpu["memory_bandwidth"]),
        ),
    ]  # fmt: skip


def copies(machine: Machine) -> list[Figure]:
    """Return copies between CPU memory and each GPU of the first node, within one, and between any two of them.

    Seconds = latency + bytes / bandwidth. A copy that is waited for by itself takes as long as a small operation does
    until it is done; pageable memory goes at the rate of a copy within CPU memory, where that is lower.
    """
    slot, peer, reached = machine.slot, machine.peer, machine.reached
    pinned = slot["bandwidth"] * reached["slot"]
    blocking = slot["latency_s"] + machine.software["done_s"]
    by_memory = {
        PAGEABLE: (blocking, min(slot["pageable_bandwidth"], pinned)),
        PINNED: (blocking, pinned),
        NON_BLOCKING: (slot["latency_s"], pinned),
    }
    figures: list[Figure] = []
    names = devices(machine)
    for device in names:
        for ends in (("cpu", device), (device, "cpu")):
            for memory, (latency, rate) in by_memory.items():
                figures += _way(parameters(*ends, memory), latency, rate, slot["bandwidth"])
        half = machine.gpu["memory_bandwidth"] / 2
        launch = machine.software["launch_s"]
        figures += _way(parameters(device, device, ""), launch, half * reached["memory"], half)
    between = peer["bandwidth"] * reached["peer"]
    for ends in permutations(names, 2):
        figures += _way(parameters(*ends, ""), slot["latency_s"], between, peer["bandwidth"])
    return figures


def _way(way: dict[str, Any], latency: float, rate: float, limit: float) -> list[Figure]:
    make = maker("copies")
    sizes: Sequence[int] = COPIES.quick["bytes"]
    of: Callable[[int], float] = lambda size: size / (latency + size / rate)  # noqa: E731
    return [
        *(make.computed(COPY, {**way, "bytes": size}, "B/s", of(size), limit=float(limit)) for size in sizes),
        make.computed("copy latency", way, "s", float(latency)),
        make.computed("copy bandwidth", way, "B/s", float(rate), limit=float(limit)),
    ]
