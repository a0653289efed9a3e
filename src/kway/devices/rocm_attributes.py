"""What AMD's GPUs are in detail, from the kernel's tree of them. Names as for NVIDIA's, where they mean the same."""

from pathlib import Path
from typing import Any

from kway.devices.cpu import ROOT
from kway.devices.rocm import architecture, gpu_nodes
from kway.devices.system_files import folders, properties

# ROCm's own limit, of every GPU that it runs on.
_THREADS_A_BLOCK = 1024
_MHZ, _KIB = 1_000_000, 1 << 10


def read(root: Path = ROOT) -> list[dict[str, Any]]:
    """Return the attributes of each GPU, in the driver's order; what is not told is left out.

    ``multiprocessors`` are compute units, ``warp_size`` is that of a wavefront, ``shared_memory_a_block_bytes`` the
    local data share. ``memory_bytes_s`` takes two transfers a clock.
    """
    return [_attributes(folder, facts) for folder, facts in gpu_nodes(root)]


def _attributes(folder: Path, facts: dict[str, int]) -> dict[str, Any]:
    bank = next(map(_properties, folders(folder / "mem_banks")), {})
    caches = [_properties(cache) for cache in folders(folder / "caches")]
    second = [cache["size"] for cache in caches if cache.get("level") == 2 and "size" in cache]
    simds, wave = facts.get("simd_per_cu", 0), facts.get("wave_front_size", 0)
    clock, width = bank.get("mem_clk_max", 0) * _MHZ, bank.get("width", 0)
    version = facts.get("gfx_target_version")
    found = {
        "architecture": architecture(version) if version else None,
        "multiprocessors": facts["simd_count"] // simds if simds else None,
        "warp_size": wave,
        "threads_a_block": _THREADS_A_BLOCK,
        "threads_a_multiprocessor": facts.get("max_waves_per_simd", 0) * simds * wave,
        "shared_memory_a_block_bytes": facts.get("lds_size_in_kb", 0) * _KIB,
        "l2_bytes": max(second, default=0) * _KIB,
        "clock_hz": facts.get("max_engine_clk_fcompute", 0) * _MHZ,
        "memory_clock_hz": clock,
        "memory_bus_bits": width,
        "memory_bytes_s": 2 * clock * width // 8,
        "chiplets": facts.get("num_xcc"),
    }
    return {name: value for name, value in found.items() if value}


def _properties(folder: Path) -> dict[str, int]:
    return properties(folder / "properties")
