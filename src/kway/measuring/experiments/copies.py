"""How fast bytes move: within CPU memory, between CPU and GPU from pageable and pinned memory, between GPUs."""

from collections.abc import Sequence
from itertools import permutations

import torch

from kway.devices import cpu
from kway.measuring.bench import Bench, Row
from kway.measuring.experiment import Experiment
from kway.measuring.figure import Figure
from kway.measuring.fitted import fitted
from kway.measuring.timer import Work
from kway.measuring.work import lazily, waited

NAME = "copy"
PAGEABLE, PINNED, NON_BLOCKING = "pageable", "pinned", "pinned, non-blocking"


class Buffers:
    """Bytes on each device and in pinned CPU memory, made once, in the largest size, when first asked for."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._held: dict[tuple[str, bool, int], torch.Tensor] = {}

    def get(self, device: str, size: int, pinned: bool = False, number: int = 0) -> torch.Tensor:
        """Return the first ``size`` bytes of a buffer; ``number`` tells two on one device apart."""
        key = device, pinned, number
        if key not in self._held:
            self._held[key] = torch.ones(self._size, dtype=torch.uint8, device=device, pin_memory=pinned)
        return self._held[key][:size]


def copy(buffers: Buffers, source: str, target: str, memory: str, size: int) -> Work:
    """Return the copy of ``size`` bytes. The clock stops when they have arrived.

    Only copies of ``NON_BLOCKING`` are queued one after the other: others wait for each by themselves.
    """

    def make() -> Work:
        ends = [
            buffers.get(device, size, device == "cpu" and memory != PAGEABLE, number)
            for number, device in enumerate((source, target))
        ]
        later = memory == NON_BLOCKING
        gpus = [device for device in (source, target) if device != "cpu"]

        def wait() -> None:
            for gpu in gpus:
                torch.cuda.synchronize(gpu)

        return waited(lambda: ends[1].copy_(ends[0], non_blocking=later), wait)

    return lazily(make)


def ways(devices: Sequence[str]) -> list[tuple[str, str, str]]:
    """List (source, target, kind of CPU memory) of all copies between devices; ``""`` where no CPU memory is in it."""
    gpus = [device for device in devices if device != "cpu"]
    found = [("cpu", "cpu", PAGEABLE)]
    for gpu in gpus:
        for ends in (("cpu", gpu), (gpu, "cpu")):
            found += [(*ends, memory) for memory in (PAGEABLE, PINNED, NON_BLOCKING)]
        found.append((gpu, gpu, ""))
    return found + [(*pair, "") for pair in permutations(gpus, 2)]


def run(bench: Bench) -> list[Figure]:
    """Measure each way by size, and fit latency and bandwidth to it."""
    wanted = bench.sizes["bytes"] if bench.gpus else bench.sizes["bytes_cpu"]
    # Two pageable and two pinned buffers, and as much left for others.
    room = cpu.memory()[1] // 8
    sizes = [size for size in wanted if size <= max(room, wanted[0])]
    buffers = Buffers(max(sizes))
    figures: list[Figure] = []
    all_ways = ways(bench.devices)
    for source, target, memory in all_ways:
        rows = [
            Row(
                NAME,
                parameters(source, target, memory) | {"bytes": size},
                copy(buffers, source, target, memory, size),
                "B/s",
                lambda seconds, size=size: size / seconds,  # type: ignore[misc]
                limit_of(bench, source, target, size),
                family=NAME,
                work=float(size),
            )
            for size in sizes
        ]
        device = source if target == "cpu" else target
        measured = bench.measure(rows, device, 1 / len(all_ways))
        figures += measured + line_of(bench, source, target, memory, measured)
    return figures


def parameters(source: str, target: str, memory: str) -> dict[str, str]:
    """Return the parameters that tell one way from another."""
    return {"from": source, "to": target} | ({"memory": memory} if memory else {})


def limit_of(bench: Bench, source: str, target: str, size: int) -> float | None:
    """Return what the way between two devices carries; within one, each byte is read and written."""
    if source == target:
        memory = bench.limits.memory.get(source)
        return memory / 2 if memory and size >= bench.sizes["beyond_caches"] else None
    if "cpu" in (source, target):
        return bench.limits.host.get(target if source == "cpu" else source)
    return bench.limits.peer.get((source, target))


def line_of(bench: Bench, source: str, target: str, memory: str, measured: Sequence[Figure]) -> list[Figure]:
    """Return latency and bandwidth of one way.

    Within CPU memory there is no such line: small copies stay in caches, each of which has a bandwidth of its own.
    """
    if source == target == "cpu":
        return []
    points = [(figure.parameters["bytes"], figure.parameters["bytes"] / figure.value) for figure in measured]
    limit = limit_of(bench, source, target, max((size for size, _ in points), default=0))
    way = parameters(source, target, memory)
    return fitted(bench.maker(bench.readings[-1]), ("copy latency", "copy bandwidth"), way, points, limit)


EXPERIMENT = Experiment(
    name="copies",
    summary="host to device, back, device to device; pageable, pinned, non-blocking; by size",
    run=run,
    quick={
        "bytes": tuple(1 << k for k in (10, 14, 18, 22, 26)),
        "bytes_cpu": tuple(1 << k for k in (10, 14, 18, 22, 26)),
        "beyond_caches": 1 << 28,
    },
    full={
        "bytes": tuple(1 << k for k in range(10, 31, 2)),
        "bytes_cpu": tuple(1 << k for k in range(10, 29, 2)),
        "beyond_caches": 1 << 28,
    },
    quick_s=4.0,
    full_s=60.0,
    by_gpu=0.25,
    order=20,
)
