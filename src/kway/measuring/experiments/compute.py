"""How fast each device computes: products, elementwise work, memory, launches, and CPU against GPU."""

from kway.measuring import in_place
from kway.measuring.bench import Bench
from kway.measuring.experiment import Experiment
from kway.measuring.figure import Figure
from kway.measuring.products import bandwidth, elementwise, launches, products

MIB = 1 << 20


def run(bench: Bench) -> list[Figure]:
    """Measure each device by itself, then CPU and first GPU beside each other."""
    figures: list[Figure] = []
    for device in bench.devices:
        kind = "cpu" if device == "cpu" else "gpu"
        part = bench.part_of(device)
        figures += bench.measure(
            products(device, bench.sizes[f"products_{kind}"], bench.limits), device, 0.45 * part
        )
        light = elementwise(device, bench.sizes[f"elements_{kind}"], bench.limits) + launches(device)
        light += bandwidth(device, bench.sizes[f"bytes_{kind}"], bench.limits)
        figures += bench.measure(light, device, 0.25 * part)
    for device in bench.devices[:2]:
        figures += bench.measure(
            in_place.rows(device, bench.sizes["in_place"]), device, 0.3 * bench.part_of(device)
        )
    return figures + in_place.compared(bench, figures)


EXPERIMENT = Experiment(
    name="compute",
    summary="matrix products, elementwise work, memory bandwidth, launches, CPU against GPU",
    run=run,
    quick={
        "products_cpu": (256, 1024),
        "products_gpu": (1024, 4096, 8192),
        "elements_cpu": (1 << 12, 1 << 16, 1 << 20, 1 << 23),
        "elements_gpu": (1 << 12, 1 << 16, 1 << 20, 1 << 24, 1 << 28),
        "bytes_cpu": 128 * MIB,
        "bytes_gpu": 1024 * MIB,
        "in_place": (4, 16, 64, 250, 1000, 2000, 4000),
    },
    full={
        "products_cpu": (64, 128, 256, 512, 1024, 2048, 4096),
        "products_gpu": (256, 512, 1024, 2048, 4096, 8192, 16384),
        "elements_cpu": tuple(1 << k for k in range(8, 27, 2)),
        "elements_gpu": tuple(1 << k for k in range(8, 29, 2)),
        "bytes_cpu": 512 * MIB,
        "bytes_gpu": 4096 * MIB,
        "in_place": (4, 8, 16, 32, 64, 125, 250, 500, 1000, 2000, 4000, 8000, 12000),
    },
    quick_s=9.0,
    full_s=120.0,
    by_gpu=0.25,
    order=10,
)
