"""How fast a GPU can be at most, as its driver tells it through NVML: clocks, memory bus and slot. Without torch."""

from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

# NVML's numbers of two clocks.
SM_CLOCK, MEMORY_CLOCK = 1, 2
# Bytes a second and lane, each way, after the encoding of the line: 2.5 and 5 GT/s with 8b/10b, then 128b/130b; from
# generation 6 on packets of fixed size (242 of 256 bytes) at 64 GT/s.
PER_LANE = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}


class Rates(NamedTuple):
    """``clock``: the highest, of a multiprocessor, in Hz; ``memory`` and ``slot`` (PCIe, each way) in bytes a second.

    ``None`` for what the driver does not tell: a virtual machine may know neither slot nor clocks.
    """

    clock: float | None = None
    memory: float | None = None
    slot: float | None = None


def read(physical: int, load: Callable[[], Any] = lambda: import_module("pynvml")) -> Rates:
    """Ask the driver about its GPU ``physical``. Never raises."""
    try:
        nvml = load()
        nvml.nvmlInit()
        try:
            return _rates(nvml, nvml.nvmlDeviceGetHandleByIndex(physical))
        finally:
            nvml.nvmlShutdown()
    except Exception:
        # No driver, no package, no such GPU: nothing is known.
        return Rates()


def _rates(nvml: Any, handle: Any) -> Rates:
    def ask(question: str, *more: int) -> int:
        try:
            return int(getattr(nvml, question)(handle, *more))
        except Exception:
            # An NVML error, or a function that an older package lacks: this one is unknown, others may not be.
            return 0

    clock, memory_clock = (1e6 * ask("nvmlDeviceGetMaxClockInfo", kind) for kind in (SM_CLOCK, MEMORY_CLOCK))
    lanes = ask("nvmlDeviceGetMaxPcieLinkWidth")
    per_lane = PER_LANE.get(ask("nvmlDeviceGetMaxPcieLinkGeneration"), 0.0)
    # Two transfers a clock, as many bits each as the bus is wide.
    memory = 2 * memory_clock * ask("nvmlDeviceGetMemoryBusWidth") / 8
    return Rates(clock or None, memory or None, lanes * per_lane or None)
