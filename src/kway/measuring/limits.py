"""What the hardware allows, where that is known: the figure that stands beside a measured one.

Of CPUs: ``kway.devices.cpu_peak``. Of NVIDIA GPUs: multiprocessors times highest clock times floating-point operations
a clock, and memory clock times two times bus width. The operations by clock and multiprocessor are NVIDIA's, dense, of
tensor cores where a type has some (white papers of V100, A100, H100); other generations are left unknown.
"""

from dataclasses import dataclass, field

import torch

from kway.devices import gpu_rates
from kway.devices.cpu_peak import flops_s
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
    # Hyper-threads share the units of a core.
    cores = min(cluster.cpu["cores"], cluster.cpu["usable"])
    found.flops.update({("cpu", name): rate for name, rate in flops_s(cores).items()})
    gpus = {f"cuda:{gpu['index']}": gpu for gpu in cluster.gpus}
    for device, gpu in gpus.items():
        if device not in devices:
            continue
        rates = gpu_rates.read(gpu["physical"])
        units = torch.cuda.get_device_properties(device).multi_processor_count
        peaks = gpu_flops(str(gpu["compute_capability"]), units, rates.clock)
        found.flops.update({(device, name): rate for name, rate in peaks.items()})
        if rates.memory:
            found.memory[device] = rates.memory
        if rates.slot:
            found.host[device] = rates.slot
    found.peer.update(peer_limits(cluster, devices))
    return found


def gpu_flops(capability: str, units: int, clock: float | None) -> dict[str, float]:
    """Return operations a second by dtype name, of ``units`` multiprocessors at ``clock`` Hz; empty where unknown."""
    by_type = PER_CLOCK.get(capability, {}) if clock else {}
    return {name: units * (clock or 0.0) * each for name, each in by_type.items()}


def peer_limits(cluster: Cluster, devices: tuple[str, ...]) -> dict[tuple[str, str], float]:
    """Return what the NVLinks between each two of the devices carry each way, by pair in both orders."""
    found = {}
    capabilities = {f"cuda:{gpu['index']}": gpu["compute_capability"] for gpu in cluster.gpus}
    for link in cluster.links:
        ends = f"cuda:{link['a']}", f"cuda:{link['b']}"
        each = NVLINK.get(str(capabilities.get(ends[0])))
        if each and link["nvlinks"] and all(end in devices for end in ends):
            found[ends] = found[ends[::-1]] = each * link["nvlinks"]
    return found
