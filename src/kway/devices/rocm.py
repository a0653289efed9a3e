"""The GPUs that AMD's driver has, as the kernel shows them under ``/sys``: without torch or a library of ROCm.

The tree of the compute driver (KFD) tells what each GPU is, that of its PCI device what it is called and its memory. A
build of torch for ROCm calls these GPUs ``cuda:0`` and so on, and its NCCL is RCCL.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kway.devices.cpu import ROOT
from kway.devices.cuda import Driver, absent
from kway.devices.system_files import folders, number, properties, text

TREE = "sys/class/kfd/kfd/topology/nodes"
NO_DRIVER = "no driver of AMD GPUs was found"
_PCIE, _XGMI = 2, 11


def gpu_nodes(root: Path = ROOT) -> list[tuple[Path, dict[str, int]]]:
    """Return folder and properties of each GPU in the driver's tree; nodes without vector units are processors."""
    found = [(folder, properties(folder / "properties")) for folder in folders(root / TREE, "[0-9]*")]
    return [(folder, facts) for folder, facts in found if facts.get("simd_count")]


def read(root: Path = ROOT) -> Driver:
    """Describe AMD's GPUs as ``cuda.read`` does NVIDIA's. Never raises: what is not told is ``None`` or ``unknown``.

    ``compute_capability`` is the architecture (``gfx90a``), ``uuid`` is spelled as ROCm does. ``over`` of a link is
    ``xgmi`` (Infinity Fabric), ``pcie`` or ``unknown``.
    """
    if not (root / TREE).is_dir():
        return absent(NO_DRIVER)
    nodes = gpu_nodes(root)
    version = text(root / "sys/module/amdgpu/version") or text(root / "proc/sys/kernel/osrelease") or None
    gpus = [_gpu(index, folder, facts, root) for index, (folder, facts) in enumerate(nodes)]
    problem = "" if gpus else "the driver of AMD GPUs lists no GPU"
    return Driver(version, gpus, _links([folder for folder, _ in nodes]), problem, maker="AMD")


def architecture(version: int) -> str:
    """Return the name that compilers use for ``gfx_target_version``: ``gfx90a`` for 90010."""
    return f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"


def bus_of(facts: Mapping[str, int]) -> str:
    """Return the PCI address of a GPU from its properties, as the system writes it."""
    place = facts.get("location_id", 0)
    return f"{facts.get('domain', 0):04x}:{place >> 8 & 0xFF:02x}:{place >> 3 & 0x1F:02x}.{place & 7}"


def _gpu(index: int, folder: Path, facts: Mapping[str, int], root: Path) -> dict[str, Any]:
    bus = bus_of(facts)
    device = root / "sys/bus/pci/devices" / bus
    total = number(device / "mem_info_vram_total")
    if total is None:
        banks = [properties(bank / "properties") for bank in folders(folder / "mem_banks")]
        total = sum(bank.get("size_in_bytes", 0) for bank in banks) or None
    used = number(device / "mem_info_vram_used")
    version, unique = facts.get("gfx_target_version"), facts.get("unique_id")
    return {
        "physical": index,
        "name": text(device / "product_name") or text(folder / "name") or "unknown",
        "uuid": f"GPU-{unique:016x}" if unique else None,
        "memory_total": total,
        "memory_free": None if total is None or used is None else max(0, total - used),
        "compute_capability": architecture(version) if version else None,
        "bus": bus,
        "mig": [],
    }


def _links(nodes: Sequence[Path]) -> list[dict[str, Any]]:
    kinds: dict[tuple[str, str], int] = {}
    for node in nodes:
        for name in ("io_links", "p2p_links"):
            for link in folders(node / name):
                facts = properties(link / "properties")
                # Where a pair has both, the first tree has the faster link.
                kinds.setdefault((node.name, str(facts.get("node_to"))), facts.get("type", 0))
    names = {_PCIE: "pcie", _XGMI: "xgmi"}
    return [
        {
            "a": a,
            "b": b,
            "peer": True if (first.name, second.name) in kinds else None,
            "over": names.get(kinds.get((first.name, second.name), 0), "unknown"),
            "nvlinks": None,
        }
        for a, first in enumerate(nodes)
        for b, second in enumerate(nodes)
        if a < b
    ]
