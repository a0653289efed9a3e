"""What the hardware allows, where that is known: the figure that stands beside a measured one.

Of NVIDIA GPUs: streaming multiprocessors times highest clock times floating-point operations a clock, and memory clock
times two times bus width. The operations by clock and multiprocessor are NVIDIA's, dense, of tensor cores where a type
has some (tuning guides and white papers of V100, A100, H100); other generations are left unknown.
"""

from dataclasses import dataclass, field
from typing import Any

import torch

from kway.devices.bus import pcie_bytes_s
from kway.records import Cluster

# By compute capability, dtype name -> operations by clock and multiprocessor, two for a multiply-add.
PER_CLOCK: dict[str, dict[str, int]] = {
    "7.0": {"fp64": 64, "fp32": 128, "fp16": 1024},
    "8.0": {"fp64": 128, "fp32": 128, "tf32": 1024, "bf16": 2048, "fp16": 2048},
    "9.0": {"fp64": 256, "fp32": 256, "tf32": 2048, "bf16": 4096, "fp16": 4096},
}
# Bytes a second of one NVLink, each way, by compute capability.
NVLINK = {"7.0": 25e9, "8.0": 25e9, "9.0": 25e9, "10.0": 50e9}


@dataclass(frozen=True)
class Limits:
    """``flops`` by (device, dtype name), ``memory`` and ``host`` (its way to CPU memory) by device, ``peer`` by pair of
    devices: operations or bytes a second. What is not in a table is not known.
    """

    flops: dict[tuple[str, str], float] = field(default_factory=dict)
    memory: dict[str, float] = field(default_factory=dict)
    host: dict[str, float] = field(default_factory=dict)
    peer: dict[tuple[str, str], float] = field(default_factory=dict)


def limits_of(cluster: Cluster, devices: tuple[str, ...]) -> Limits:
    """Return the limits of these devices."""
    found = Limits()
    gpus = {f"cuda:{gpu['index']}": gpu for gpu in cluster.gpus}
    for device in devices:
        gpu = gpus.get(device)
        if gpu is None:
            continue
        facts = torch.cuda.get_device_properties(device)
        rates = gpu_rates(facts)
        found.flops.update({(device, name): rate for name, rate in rates["flops"].items()})
        if rates["memory"]:
            found.memory[device] = rates["memory"]
        host = pcie_bytes_s(gpu["physical"])
        if host:
            found.host[device] = host
    for link in cluster.links:
        ends = f"cuda:{link['a']}", f"cuda:{link['b']}"
        if link["nvlinks"] and all(end in devices for end in ends):
            each = NVLINK.get(str(gpus[ends[0]]["compute_capability"]))
            if each:
                found.peer[ends] = found.peer[ends[::-1]] = each * link["nvlinks"]
    return found


def gpu_rates(facts: Any) -> dict[str, Any]:
    """Return ``flops`` (operations a second by dtype name) and ``memory`` (bytes a second, or ``None``) of a GPU.

    ``facts`` as ``torch.cuda.get_device_properties`` gives them: clocks in kHz, the bus in bits. Older versions of
    torch tell no clocks.
    """
    clock = getattr(facts, "clock_rate", 0) * 1e3
    memory_clock = getattr(facts, "memory_clock_rate", 0) * 1e3
    width = getattr(facts, "memory_bus_width", 0)
    by_type = PER_CLOCK.get(f"{facts.major}.{facts.minor}", {})
    units = facts.multi_processor_count
    return {
        "flops": {name: units * clock * each for name, each in by_type.items() if clock},
        "memory": 2 * memory_clock * width / 8 or None,
    }
