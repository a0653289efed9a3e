"""What reaches other machines: InfiniBand ports and network interfaces, as the system lists them."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kway.backends import ETHERNET, INFINIBAND, IP_OVER_INFINIBAND
from kway.devices.cpu import ROOT
from kway.devices.numa import of_device
from kway.devices.system_files import folders, number, text

# The kernel's numbers for the hardware of an interface (if_arp.h).
_KINDS = {1: ETHERNET, 32: IP_OVER_INFINIBAND}


def infiniband(root: Path = ROOT) -> list[dict[str, Any]]:
    """List the ports of all InfiniBand adapters, those that carry Ethernet (RoCE) among them.

    Each has ``device``, ``port``, ``layer`` (``InfiniBand`` or ``Ethernet``), ``state`` (``ACTIVE``, ``DOWN``, ...),
    ``bits_s`` (of the link, ``None`` where not told), ``rate`` (that in the system's words), ``firmware`` and
    ``numa_node``.
    """
    return [
        {
            "device": adapter.name,
            "port": int(port.name),
            "layer": text(port / "link_layer") or "unknown",
            "state": text(port / "state").partition(":")[2].strip() or "unknown",
            "bits_s": _rate(text(port / "rate")),
            "rate": text(port / "rate"),
            "firmware": text(adapter / "fw_ver") or None,
            "numa_node": of_device(adapter / "device"),
        }
        for adapter in folders(root / "sys/class/infiniband")
        for port in folders(adapter / "ports", "[0-9]*")
    ]


def interfaces(root: Path = ROOT) -> list[dict[str, Any]]:
    """List the network interfaces that are up and reach others: Ethernet and IP over InfiniBand.

    Each has ``name``, ``kind`` (``Ethernet`` or ``IP over InfiniBand``), ``bits_s`` (``None`` where not told, as in
    most virtual machines) and ``numa_node``.
    """
    found = []
    for folder in folders(root / "sys/class/net"):
        kind = _KINDS.get(number(folder / "type") or 0)
        if kind is None or text(folder / "operstate") != "up":
            continue
        speed = number(folder / "speed")
        found.append(
            {
                "name": folder.name,
                "kind": kind,
                "bits_s": speed * 1_000_000 if speed and speed > 0 else None,
                "numa_node": of_device(folder / "device"),
            }
        )
    return found


def between_gpus(environ: Mapping[str, str], ports: Iterable[Mapping[str, Any]]) -> str:
    """Return what NCCL takes between machines: InfiniBand where a port of it is active and not ruled out."""
    if environ.get("NCCL_IB_DISABLE", "").strip() not in ("", "0"):
        return ETHERNET
    active = any(port["layer"] == INFINIBAND and port["state"] == "ACTIVE" for port in ports)
    return INFINIBAND if active else ETHERNET


def between_cpus(environ: Mapping[str, str], found: Iterable[Mapping[str, Any]]) -> str:
    """Return what Gloo takes between machines: IP over InfiniBand where it is named, or where there is nothing else."""
    kinds = {interface["name"]: interface["kind"] for interface in found}
    first = environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0].strip()
    used = {kinds[first]} if first in kinds else set(kinds.values())
    return IP_OVER_INFINIBAND if used == {IP_OVER_INFINIBAND} else ETHERNET


def _rate(words: str) -> int | None:
    """Read ``400 Gb/sec (4X NDR)`` as bits a second."""
    value, _, unit = words.partition(" ")
    try:
        return int(float(value) * 1e9) if unit.startswith("Gb/sec") else None
    except ValueError:
        return None
