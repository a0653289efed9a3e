"""Matrix products, elementwise work and memory traffic on one device, as rows to measure."""

from collections.abc import Callable, Sequence

import torch

from kway.measuring.bench import Row
from kway.measuring.limits import Limits
from kway.measuring.reference import normal
from kway.measuring.timer import Work
from kway.measuring.work import computed, each_waited, launched, lazily, waiter
from kway.step.tf32 import tf32

DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
# TF32 is a way of NVIDIA's tensor cores; half precision has no fast products on CPUs.
ON_CPU = ("fp64", "fp32", "bf16")


def dtypes_on(device: str) -> tuple[str, ...]:
    """Return the names of the dtypes that are measured on a device."""
    return ON_CPU if device == "cpu" else tuple(DTYPES)


def with_tf32(allowed: bool, run: Work) -> Work:
    """Return work during which float32 products may use TF32, or may not; what was allowed before is restored."""

    def flagged(count: int) -> float:
        with tf32(allowed):
            return run(count)

    return flagged


def product(device: str, name: str, size: int) -> Work:
    """Return the product of two square matrices of a dtype, into memory that is there."""

    def make() -> Work:
        a, b = (normal(device, DTYPES[name], size, size) for _ in range(2))
        out = torch.empty_like(a)
        return with_tf32(name == "tf32", computed(lambda: torch.mm(a, b, out=out), device))

    return lazily(make)


def products(
    device: str, sizes: Sequence[int], limits: Limits, dtypes: Sequence[str] | None = None
) -> list[Row]:
    """Return products of n x n matrices, 2 n^3 operations each, in floating-point operations a second.

    ``dtypes``: by name; all of the device where ``None``.
    """
    return [
        Row(
            "matrix product",
            {"device": device, "dtype": name, "n": size},
            product(device, name, size),
            "FLOP/s",
            _rate(2 * size**3),
            limits.flops.get((device, name)),
            family=f"product {name}",
            work=float(size) ** 3,
        )
        for name in dtypes or dtypes_on(device)
        for size in sizes
    ]


def elementwise(device: str, counts: Sequence[int], limits: Limits) -> list[Row]:
    """Return the sum of two vectors into a third, in elements a second; the limit is that of three times the bytes."""
    rows = []
    for name in dtypes_on(device):
        if name == "tf32":
            continue
        width = DTYPES[name].itemsize
        memory = limits.memory.get(device)
        for count in counts:
            rows.append(
                Row(
                    "elementwise add",
                    {"device": device, "dtype": name, "elements": count},
                    _add(device, DTYPES[name], count),
                    "elements/s",
                    _rate(count),
                    # What fits into a cache does not go through memory: the limit is none of small vectors.
                    memory / (3 * width) if memory and 3 * width * count >= BEYOND_CACHES else None,
                    family=f"add {name}",
                    work=float(count),
                )
            )
    return rows


# Bytes that are in no cache of today's GPUs (50 to 126 MB).
BEYOND_CACHES = 1 << 28


def bandwidth(device: str, size: int, limits: Limits) -> list[Row]:
    """Return the copy of ``size`` bytes within a device's memory: bytes read and written, a second."""

    def make() -> Work:
        source = torch.ones(size // 4, device=device)
        target = torch.empty_like(source)
        return computed(lambda: target.copy_(source), device)

    return [
        Row(
            "memory bandwidth",
            {"device": device, "bytes": size},
            lazily(make),
            "B/s",
            _rate(2 * size),
            limits.memory.get(device),
            ("bytes read and bytes written both count",),
            family="copy",
            work=float(size),
        )
    ]


def launches(device: str) -> list[Row]:
    """Return the time that the smallest operation takes: until its call returns, and until it is done."""

    def made(way: Callable[..., Work]) -> Work:
        def make() -> Work:
            one = torch.ones(1, device=device)
            return way(lambda: one.add_(1.0), waiter(device))

        return lazily(make)

    if device == "cpu":
        return [Row("launch", {"device": device, "until": "done"}, made(launched))]
    return [
        Row("launch", {"device": device, "until": "queued"}, made(launched)),
        Row("launch", {"device": device, "until": "done"}, made(each_waited)),
    ]


def _add(device: str, dtype: torch.dtype, count: int) -> Work:
    def make() -> Work:
        a, b = torch.ones(count, device=device, dtype=dtype), torch.ones(count, device=device, dtype=dtype)
        out = torch.empty_like(a)
        return computed(lambda: torch.add(a, b, out=out), device)

    return lazily(make)


def _rate(amount: float) -> Callable[[float], float]:
    """Return what turns seconds of one repeat into amounts a second."""
    return lambda seconds: amount / seconds
