"""How a GPU is connected: what its PCIe slot can carry, asked through NVML without torch."""

from importlib import import_module
from typing import Any

# Bytes a second and lane, each way, after the encoding of the line: 2.5 and 5 GT/s with 8b/10b, then 128b/130b; from
# generation 6 on packets of fixed size (242 of 256 bytes) at 64 GT/s.
PER_LANE = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}


def pcie_bytes_s(physical: int, nvml: Any = None) -> float | None:
    """Return what the slot of the driver's GPU ``physical`` carries each way, in bytes a second; ``None``: unknown.

    A virtual machine may not know its slot, and then the driver tells none, or one of no lanes.
    """
    try:
        nvml = nvml or import_module("pynvml")
        nvml.nvmlInit()
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(physical)
            generation = nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle)
            lanes = nvml.nvmlDeviceGetMaxPcieLinkWidth(handle)
        finally:
            nvml.nvmlShutdown()
    except Exception:
        # An NVML error, an older package, no driver: all mean unknown.
        return None
    return PER_LANE[generation] * lanes if generation in PER_LANE and lanes else None
