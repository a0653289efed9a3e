"""What NVIDIA's GPUs are in detail, asked of the driver's own library: no torch, and no memory on a GPU.

The library applies ``CUDA_VISIBLE_DEVICES`` itself and counts as torch does.
"""

import ctypes
from collections.abc import Callable
from typing import Any

LIBRARY = "libcuda.so.1"
# By our name: CUDA's number of the attribute (CUdevice_attribute in cuda.h), and what one of its units is in ours.
NUMBERS = {
    "multiprocessors": (16, 1),
    "warp_size": (10, 1),
    "threads_a_block": (1, 1),
    "threads_a_multiprocessor": (39, 1),
    "blocks_a_multiprocessor": (106, 1),
    "registers_a_block": (12, 1),
    "registers_a_multiprocessor": (82, 1),
    "shared_memory_a_block_bytes": (8, 1),
    "shared_memory_a_block_at_most_bytes": (97, 1),
    "shared_memory_a_multiprocessor_bytes": (81, 1),
    "constant_memory_bytes": (9, 1),
    "l2_bytes": (38, 1),
    "l2_persisting_bytes": (108, 1),
    "clock_hz": (13, 1000),
    "memory_clock_hz": (36, 1000),
    "memory_bus_bits": (37, 1),
    "copy_engines": (40, 1),
}
# Those of several numbers, and those that are yes or no.
_CAPABILITY, _BLOCK, _GRID = (75, 76), (2, 3, 4), (5, 6, 7)
SWITCHES = {
    "concurrent_kernels": 31,
    "error_correction": 32,
    "integrated": 18,
    "unified_addressing": 41,
    "managed_memory": 83,
    "concurrent_managed_access": 89,
    "cooperative_launch": 95,
    "memory_pools": 115,
    "gpu_direct_rdma": 116,
}


def read(load: Callable[[], Any] = lambda: ctypes.CDLL(LIBRARY)) -> list[dict[str, Any]]:
    """Return the attributes of each GPU that CUDA shows, in torch's order. Never raises; empty where there is none.

    Sizes end in ``_bytes``, clocks in ``_hz``. ``compute_capability``, ``block`` and ``grid`` (the most threads, and
    blocks, along x, y and z) are lists. ``memory_bytes_s`` is what clock and width of the memory's bus give at most,
    two transfers a clock. What the driver does not tell is left out.
    """
    try:
        library = load()
        if library.cuInit(0):
            return []
        count = ctypes.c_int()
        if library.cuDeviceGetCount(ctypes.byref(count)):
            return []
        return [_attributes(library, index) for index in range(count.value)]
    except (OSError, AttributeError):
        return []


def _attributes(library: Any, index: int) -> dict[str, Any]:
    device = ctypes.c_int()
    if library.cuDeviceGet(ctypes.byref(device), index):
        return {}

    def ask(number: int) -> int | None:
        value = ctypes.c_int()
        return None if library.cuDeviceGetAttribute(ctypes.byref(value), number, device) else value.value

    def several(numbers: tuple[int, ...]) -> list[int] | None:
        values = [value for number in numbers if (value := ask(number)) is not None]
        return values if len(values) == len(numbers) else None

    found: dict[str, Any] = {"compute_capability": several(_CAPABILITY)}
    for name, (number, unit) in NUMBERS.items():
        value = ask(number)
        # A driver of a virtual machine tells some of them as nothing.
        found[name] = value * unit if value else None
    if found["memory_clock_hz"] and found["memory_bus_bits"]:
        found["memory_bytes_s"] = 2 * found["memory_clock_hz"] * found["memory_bus_bits"] // 8
    found |= {"block": several(_BLOCK), "grid": several(_GRID)}
    for name, number in SWITCHES.items():
        value = ask(number)
        found[name] = None if value is None else bool(value)
    return {name: value for name, value in found.items() if value is not None}
