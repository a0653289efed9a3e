"""How fast each device computes: products, elementwise work, memory, launches, and CPU against GPU."""

from kway.measuring import in_place
from kway.measuring.bench import Bench
from kway.measuring.budget import Seconds
from kway.measuring.experiment import Experiment
from kway.measuring.figure import Figure
from kway.measuring.products import bandwidth, elementwise, launches, products

MIB = 1 << 20
# What a GPU that another one stands for is measured in: enough to tell that it is slower.
GLIMPSE = ("fp32", "bf16")


def run(bench: Bench) -> list[Figure]:
    """Measure each device by itself, GPUs first; the CPU and the first GPU also beside each other."""
    figures: dict[str, list[Figure]] = {}
    kinds = [gpu for gpu in bench.gpus if gpu not in bench.alike]
    for gpu in kinds:
        figures[gpu] = measured(bench, gpu, (0.7 if bench.alike else 1.0) / len(kinds))
    for gpu in bench.alike:
        figures[gpu] = glimpse(bench, gpu, 0.3 / len(bench.alike))
    figures["cpu"] = measured(bench, "cpu", 1.0)
    if bench.alike:
        bench.notes.append(
            f"{', '.join(bench.alike)}: of the kind of {' and '.join(dict.fromkeys(bench.alike.values()))}, and "
            "measured in one size here; a full measurement takes all"
        )
    found = [figure for device in bench.devices for figure in figures[device]]
    return found + in_place.compared(bench, found)


def measured(bench: Bench, device: str, part: float) -> list[Figure]:
    """Measure all of a device within ``part`` of its budget."""
    kind = "cpu" if device == "cpu" else "gpu"
    figures = bench.measure(
        products(device, bench.sizes[f"products_{kind}"], bench.limits), device, 0.45 * part
    )
    light = elementwise(device, bench.sizes[f"elements_{kind}"], bench.limits) + launches(device)
    light += bandwidth(device, bench.sizes[f"bytes_{kind}"], bench.limits)
    figures += bench.measure(light, device, 0.25 * part)
    if device in bench.devices[:2]:
        figures += bench.measure(in_place.rows(device, bench.sizes["in_place"]), device, 0.3 * part)
    return figures


def glimpse(bench: Bench, device: str, part: float) -> list[Figure]:
    """Measure the largest products of two dtypes, and memory."""
    rows = products(device, bench.sizes["products_gpu"][-1:], bench.limits, GLIMPSE)
    return bench.measure(rows + bandwidth(device, bench.sizes["bytes_gpu"], bench.limits), device, part)


EXPERIMENT = Experiment(
    name="compute",
    summary="matrix products, elementwise work, memory bandwidth, launches, CPU against GPU",
    run=run,
    quick={
        "products_cpu": (256, 1024),
        "products_gpu": (1024, 4096, 8192),
        "elements_cpu": (1 << 12, 1 << 16, 1 << 20, 1 << 24),
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
    quick_s=Seconds(9.0, cpu=4.0, gpu=4.5, more=0.6),
    full_s=Seconds(120.0, cpu=60.0, gpu=60.0, more=30.0),
    order=10,
)
