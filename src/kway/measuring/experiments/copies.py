"""How fast bytes move: within CPU memory, between CPU and GPU from pageable and pinned memory, between GPUs."""

from collections.abc import Sequence
from functools import partial
from itertools import permutations

import torch

from kway.devices import cpu
from kway.measuring.bench import Bench, Row
from kway.measuring.budget import Seconds
from kway.measuring.experiment import Experiment
from kway.measuring.figure import Figure
from kway.measuring.fitted import fitted
from kway.measuring.timer import Work
from kway.measuring.work import lazily, waited

NAME = "copy"
PAGEABLE, PINNED, NON_BLOCKING = "pageable", "pinned", "pinned, non-blocking"
WITHIN = "cpu", "cpu", PAGEABLE
# Bytes that could be copied in the time that a copy takes to begin, about.
BEGIN = 1 << 18


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

    Only copies of ``NON_BLOCKING``, and those between GPUs, are queued one after the other: others wait for each by
    themselves.
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
    found: list[tuple[str, str, str]] = [WITHIN]
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
    taken = chosen(bench, sizes)
    whole = sum(len(each) for way, each in taken.items() if way != WITHIN) or 1
    figures: dict[tuple[str, str, str], list[Figure]] = {}
    # GPUs first.
    for way in (*(way for way in taken if way != WITHIN), WITHIN):
        source, target, memory = way
        rows = [_row(bench, buffers, way, size) for size in taken[way]]
        device = source if target == "cpu" else target
        measured = bench.measure(rows, device, 1.0 if way == WITHIN else len(rows) / whole)
        figures[way] = measured + line_of(bench, source, target, memory, measured)
    return [figure for way in taken for figure in figures[way]]


def chosen(bench: Bench, sizes: Sequence[int]) -> dict[tuple[str, str, str], Sequence[int]]:
    """Return the sizes to measure by way: all, and the largest alone where another way stands for it.

    Of a GPU that another one stands for, the way from and to pinned memory is measured. Of several pairs of GPUs of the
    same kinds with as many links, the first one stands for all.
    """
    taken: dict[tuple[str, str, str], Sequence[int]] = {}
    seen: set[object] = set()
    for source, target, memory in ways(bench.devices):
        ends = tuple(bench.alike.get(end, end) for end in (source, target))
        link = (*ends, bench.limits.peer.get((source, target)))
        if not bench.alike or (source, target) == ends:
            taken[source, target, memory] = sizes
        elif "cpu" in ends and memory == NON_BLOCKING:
            taken[source, target, memory] = sizes[-1:]
        elif "cpu" not in ends and source != target:
            taken[source, target, memory] = sizes[-1:] if link in seen else sizes
            seen.add(link)
    if bench.alike:
        kinds = " and ".join(dict.fromkeys(bench.alike.values()))
        bench.notes.append(
            f"{', '.join(bench.alike)}: of the kind of {kinds}, and measured in the largest size of some ways; so are "
            "pairs of GPUs with equal links but one. A full measurement takes all"
        )
    return taken


def _row(bench: Bench, buffers: Buffers, way: tuple[str, str, str], size: int) -> Row:
    source, target, _ = way
    return Row(
        NAME,
        parameters(*way) | {"bytes": size},
        copy(buffers, *way, size),
        "B/s",
        partial(rate, size),
        limit_of(bench, source, target, size),
        family=NAME,
        work=float(BEGIN + size),
    )


def rate(size: int, seconds: float) -> float:
    """Return bytes a second."""
    return size / seconds


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
    make, names = bench.maker(bench.readings[-1]), ("copy latency", "copy bandwidth")
    # See ``copy``: those of others wait for each.
    return fitted(make, names, way, points, limit, queued=memory in (NON_BLOCKING, ""))


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
    quick_s=Seconds(4.0, cpu=0.6, gpu=1.6, more=0.6),
    full_s=Seconds(60.0, cpu=10.0, gpu=50.0, more=40.0),
    order=20,
    version=2,
)
