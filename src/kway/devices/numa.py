"""Nodes of non-uniform memory access (NUMA): which processors and how much memory stand close to each other."""

from pathlib import Path
from typing import Any

from kway.devices.cpu import ROOT
from kway.devices.system_files import count_in_list, folders, number, text


def nodes(root: Path = ROOT) -> list[dict[str, Any]]:
    """List the NUMA nodes of this machine; empty where the system does not tell.

    Each has ``node`` (the system's number), ``processors`` (its logical ones, as a list such as ``0-15,32-47``),
    ``count`` (how many), ``memory_total`` (bytes, ``None`` where not told) and ``distances`` to all nodes in order: 10
    is its own memory, 20 takes about twice as long (the firmware's SLIT table).
    """
    found = []
    for folder in folders(root / "sys/devices/system/node", "node[0-9]*"):
        processors = text(folder / "cpulist")
        found.append(
            {
                "node": int(folder.name.removeprefix("node")),
                "processors": processors,
                "count": count_in_list(processors),
                "memory_total": _memory(text(folder / "meminfo")),
                "distances": [int(word) for word in text(folder / "distance").split() if word.isdigit()],
            }
        )
    return found


def of_bus(bus: str | None, root: Path = ROOT) -> int | None:
    """Return the node that a PCI device stands at, or ``None`` where there is one node only, or none is told.

    ``bus``: as the system or the NVIDIA driver writes it (``0000:1b:00.0``, ``00000000:1B:00.0``).
    """
    if not bus:
        return None
    domain, _, rest = bus.lower().partition(":")
    # The driver of NVIDIA writes eight digits for the domain, the system four where they suffice.
    try:
        name = f"{int(domain, 16):04x}:{rest}"
    except ValueError:
        return None
    return of_device(root / "sys/bus/pci/devices" / name)


def of_device(device: Path) -> int | None:
    """Return the node of a device's folder in ``/sys``; -1 there means that the firmware does not say."""
    node = number(device / "numa_node")
    return None if node is None or node < 0 else node


def _memory(meminfo: str) -> int | None:
    for line in meminfo.splitlines():
        words = line.split()
        if "MemTotal:" in words and words[-1] == "kB" and words[-2].isdigit():
            return int(words[-2]) * 1024
    return None
