"""What the processors are in detail: cores, clocks, caches, instruction sets. Linux and macOS."""

import os
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kway.devices.cpu import ROOT
from kway.devices.mps import Host
from kway.devices.system_files import count_in_list, folders, number, text

SYSCTL = ("sysctl", "hw")
_PROCESSORS, _FIRST = "sys/devices/system/cpu", "sys/devices/system/cpu/cpu0"
# Of hundreds of flags those that decide which kernels of torch's libraries run: vectors, short floats, tiles.
_TELLING = {
    "sse4_2", "avx", "avx2", "avx_vnni", "fma", "f16c", "neon", "asimd", "asimdhp", "fphp", "asimddp", "bf16", "i8mm",
    "sme", "sme2", "altivec", "vsx",
}  # fmt: skip
_TELLING_STARTS = ("avx512", "avx10", "amx", "sve")
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
# Names of Apple's table, of whole numbers.
_APPLE = {
    "packages": "sockets",
    "physicalcpu": "cores",
    "logicalcpu": "processors",
    "perflevel0.physicalcpu": "performance_cores",
    "perflevel1.physicalcpu": "efficiency_cores",
    "cpufrequency_max": "clock_hz",
    "l1dcachesize": "l1_data_bytes",
    "l1icachesize": "l1_instruction_bytes",
    "l2cachesize": "l2_bytes",
    "l3cachesize": "l3_bytes",
    "cachelinesize": "cache_line_bytes",
    "pagesize": "page_bytes",
}


def read(root: Path = ROOT, host: Host | None = None) -> dict[str, Any]:
    """Return what the system tells of its processors; what it does not tell is left out.

    ``architecture``, ``sockets``, ``cores``, ``processors`` (logical ones), ``threads_a_core``, clocks in Hz, caches in
    bytes (of one: ``l2_shared_by`` and ``l3_shared_by`` say how many logical processors share it), ``page_bytes`` and
    ``instruction_sets``, those that decide which kernels run.
    """
    host = Host() if host is None else host
    found = _apple(host.output(SYSCTL)) if host.system == "darwin" else _linux(root)
    told = {name: value for name, value in found.items() if value not in (None, 0, [])}
    return {"architecture": host.machine or platform.machine(), **told}


def _linux(root: Path) -> dict[str, Any]:
    threads = [folder / "topology" for folder in folders(root / _PROCESSORS, "cpu[0-9]*")]
    packages = {text(place / "physical_package_id") for place in threads} - {""}
    cores = {text(place / "thread_siblings_list") for place in threads} - {""}
    clock = root / _FIRST / "cpufreq"
    return {
        "sockets": len(packages),
        "cores": len(cores),
        "processors": len(threads),
        "threads_a_core": max(map(count_in_list, cores), default=None),
        "clock_hz": _hertz(number(clock / "cpuinfo_max_freq")),
        "base_clock_hz": _hertz(number(clock / "base_frequency")),
        "least_clock_hz": _hertz(number(clock / "cpuinfo_min_freq")),
        "clock_now_hz": _clock_now(root),
        **_caches(root),
        "page_bytes": os.sysconf("SC_PAGE_SIZE"),
        "instruction_sets": _telling(_flags(root)),
    }


def _hertz(kilo: int | None) -> int | None:
    return None if kilo is None else 1000 * kilo


def _caches(root: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for folder in folders(root / _FIRST / "cache", "index[0-9]*"):
        level, kind = text(folder / "level"), text(folder / "type").lower()
        name = f"l{level}" if kind == "unified" else f"l{level}_{kind}"
        found[f"{name}_bytes"] = _size(text(folder / "size"))
        if kind == "unified":
            found[f"{name}_shared_by"] = count_in_list(text(folder / "shared_cpu_list"))
        found.setdefault("cache_line_bytes", number(folder / "coherency_line_size"))
    return found


def _size(words: str) -> int | None:
    """Read ``32K`` as bytes."""
    digits, unit = words[:-1], words[-1:]
    return int(digits) * _UNITS[unit] if digits.isdigit() and unit in _UNITS else None


def _flags(root: Path) -> list[str]:
    # x86 calls the line flags, ARM Features.
    lines = text(root / "proc/cpuinfo").splitlines()
    return next((line.partition(":")[2].split() for line in lines if line[:5] in ("flags", "Featu")), [])


def _clock_now(root: Path) -> int | None:
    for line in text(root / "proc/cpuinfo").splitlines():
        value = line.partition(":")[2].strip()
        if line.startswith("cpu MHz") and value.replace(".", "", 1).isdigit():
            return round(1e6 * float(value))
    return None


def _telling(flags: Iterable[str]) -> list[str]:
    return sorted(flag for flag in set(flags) if flag in _TELLING or flag.startswith(_TELLING_STARTS))


def _apple(output: str) -> dict[str, Any]:
    """Read lines such as ``hw.l2cachesize: 4194304``."""
    table = {}
    for line in output.splitlines():
        name, _, value = line.partition(": ")
        if value.strip().isdigit():
            table[name.removeprefix("hw.")] = int(value)
    found: dict[str, Any] = {ours: table.get(theirs) for theirs, ours in _APPLE.items()}
    has = [name.rpartition(".")[2] for name, value in table.items() if name.startswith("optional.") and value]
    plain = (name.removeprefix("FEAT_").lower() for name in has)
    return found | {"instruction_sets": _telling(plain)}
