"""The GPUs that the NVIDIA driver has, and how they reach each other, asked through NVML without torch.

On virtual machines, in containers and with old drivers any single question may be refused. A refused
question gives ``None`` or ``unknown`` for that fact alone.
"""

import ctypes
import os
from collections.abc import Callable, MutableMapping
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

SIGNS = ("/proc/driver/nvidia", "/dev/nvidiactl", "/dev/dxg")
LIBRARY = "libnvidia-ml.so.1"
NO_DRIVER = "no NVIDIA driver was found"

# The closest thing that two GPUs share on the way to each other, by NVML's number for it.
COMMON_ANCESTOR = {
    0: "same-board",
    10: "pcie-switch",
    20: "pcie-switches",
    30: "host-bridge",
    40: "numa-node",
    50: "sockets",
}
P2P_READ, P2P_WRITE, P2P_NVLINK = 0, 1, 2
SWITCH = 2


class Driver(NamedTuple):
    """What the driver says. ``gpus`` in its own order, by PCI bus; ``links`` between its indices.

    ``problem`` says in a sentence why there is nothing to see, and is empty where there is. ``cuda``: the newest CUDA
    that it can run (``13.0``).
    """

    version: str | None
    gpus: list[dict[str, Any]]
    links: list[dict[str, Any]]
    problem: str = ""
    maker: str = "NVIDIA"
    cuda: str | None = None


def absent(problem: str) -> Driver:
    """Return a driver that shows nothing, and why."""
    return Driver(None, [], [], problem)


def driver_present() -> bool:
    """Tell whether an NVIDIA driver seems to be there, without loading a Python package for it."""
    if any(Path(sign).exists() for sign in SIGNS):
        return True
    try:
        ctypes.CDLL(LIBRARY)
    except OSError:
        return False
    return True


def read(
    present: Callable[[], bool] = driver_present,
    load: Callable[[], Any] = lambda: import_module("pynvml"),
) -> Driver:
    """Ask the driver for its GPUs. Never raises: what cannot be told is ``None`` or ``unknown``.

    Each GPU has ``physical``, ``name``, ``uuid``, ``memory_total`` and ``memory_free`` (bytes),
    ``compute_capability`` (``9.0``), ``bus`` (its PCI address) and ``mig`` (UUIDs of its instances, mostly none). Each
    link has ``a``, ``b``, ``peer`` (direct access, or ``None``), ``over`` (``nvlink``, a value of ``COMMON_ANCESTOR``,
    or ``unknown``) and ``nvlinks`` (how many, or ``None``).
    """
    if not present():
        return absent(NO_DRIVER)
    try:
        nvml = load()
    except ImportError as error:
        return absent(f"an NVIDIA driver seems to be there, but nvidia-ml-py is not: {error}")
    try:
        nvml.nvmlInit()
    except Exception as error:
        return absent(f"the NVIDIA driver does not answer: {error}")
    try:
        version = _text(_ask(nvml, "nvmlSystemGetDriverVersion"))
        newest = _ask(nvml, "nvmlSystemGetCudaDriverVersion_v2") or _ask(
            nvml, "nvmlSystemGetCudaDriverVersion"
        )
        count = _ask(nvml, "nvmlDeviceGetCount") or 0
        handles = [_ask(nvml, "nvmlDeviceGetHandleByIndex", index) for index in range(count)]
        gpus = [_gpu(nvml, index, handle) for index, handle in enumerate(handles)]
        links = _links(nvml, handles)
    finally:
        _ask(nvml, "nvmlShutdown")
    # As CUDA writes it: 1000 times the major version and 10 times the minor one.
    runs = f"{newest // 1000}.{newest % 1000 // 10}" if newest else None
    return Driver(version, gpus, links, "" if gpus else "the NVIDIA driver lists no GPU", cuda=runs)


def _ask(nvml: Any, question: str, *arguments: Any) -> Any:
    """Return NVML's answer, or ``None`` where this driver or this version of the package cannot give it."""
    try:
        return getattr(nvml, question)(*arguments)
    except Exception:
        # An NVML error, a function that an older package lacks, bytes that do not decode: all mean unknown.
        return None


def _text(value: Any) -> str | None:
    """Older versions of the package answer in bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _gpu(nvml: Any, index: int, handle: Any) -> dict[str, Any]:
    memory = capability = name = uuid = bus = None
    if handle is not None:
        name = _text(_ask(nvml, "nvmlDeviceGetName", handle))
        uuid = _text(_ask(nvml, "nvmlDeviceGetUUID", handle))
        memory = _ask(nvml, "nvmlDeviceGetMemoryInfo", handle)
        capability = _ask(nvml, "nvmlDeviceGetCudaComputeCapability", handle)
        bus = _bus(_ask(nvml, "nvmlDeviceGetPciInfo", handle))
    return {
        "physical": index,
        "name": name or "unknown",
        "uuid": uuid,
        "memory_total": None if memory is None else int(memory.total),
        "memory_free": None if memory is None else int(memory.free),
        "compute_capability": None if capability is None else f"{capability[0]}.{capability[1]}",
        "bus": bus,
        "mig": [] if handle is None else _mig(nvml, handle),
    }


def _mig(nvml: Any, handle: Any) -> list[str]:
    slots = _ask(nvml, "nvmlDeviceGetMaxMigDeviceCount", handle) or 0
    instances = (_ask(nvml, "nvmlDeviceGetMigDeviceHandleByIndex", handle, slot) for slot in range(slots))
    uuids = (_text(_ask(nvml, "nvmlDeviceGetUUID", found)) for found in instances if found is not None)
    return [uuid for uuid in uuids if uuid]


def _links(nvml: Any, handles: list[Any]) -> list[dict[str, Any]]:
    ends = [_nvlink_ends(nvml, handle) for handle in handles]
    buses = [_bus(_ask(nvml, "nvmlDeviceGetPciInfo", handle)) for handle in handles]
    return [
        {
            "a": a,
            "b": b,
            **_pair(nvml, handles[a], handles[b], _nvlinks(ends[a], ends[b], buses[a], buses[b])),
        }
        for a in range(len(handles))
        for b in range(a + 1, len(handles))
    ]


def _pair(nvml: Any, first: Any, second: Any, nvlinks: int | None) -> dict[str, Any]:
    if first is None or second is None:
        return {"peer": None, "over": "unknown", "nvlinks": None}
    reads, writes, nvlink = (
        _ask(nvml, "nvmlDeviceGetP2PStatus", first, second, kind)
        for kind in (P2P_READ, P2P_WRITE, P2P_NVLINK)
    )
    peer = None if reads is None or writes is None else reads == 0 and writes == 0
    # A count of shared links is believed only where the driver does not deny NVLink between the two.
    if nvlink == 0 or (nvlink is None and nvlinks):
        return {"peer": peer, "over": "nvlink", "nvlinks": nvlinks or None}
    ancestor = _ask(nvml, "nvmlDeviceGetTopologyCommonAncestor", first, second)
    return {"peer": peer, "over": COMMON_ANCESTOR.get(ancestor, "unknown"), "nvlinks": None}


def _bus(info: Any) -> str | None:
    found = _text(getattr(info, "busId", None))
    return None if found is None else found.upper()


def _nvlink_ends(nvml: Any, handle: Any) -> list[tuple[int | None, str | None]]:
    """Return (kind of the far end, its PCI bus) for each active NVLink of a GPU."""
    ends: list[tuple[int | None, str | None]] = []
    if handle is None:
        return ends
    for link in range(getattr(nvml, "NVML_NVLINK_MAX_LINKS", 18)):
        if _ask(nvml, "nvmlDeviceGetNvLinkState", handle, link) != 1:
            continue
        kind = _ask(nvml, "nvmlDeviceGetNvLinkRemoteDeviceType", handle, link)
        ends.append((kind, _bus(_ask(nvml, "nvmlDeviceGetNvLinkRemotePciInfo", handle, link))))
    return ends


def _nvlinks(
    first: list[tuple[int | None, str | None]],
    second: list[tuple[int | None, str | None]],
    first_bus: str | None,
    second_bus: str | None,
) -> int | None:
    """Count the NVLinks that two GPUs can use between them: direct ones, else those of both into switches."""
    if second_bus is not None and (direct := sum(bus == second_bus for _, bus in first)):
        return direct
    if first_bus is not None and (direct := sum(bus == first_bus for _, bus in second)):
        return direct
    return min(sum(kind == SWITCH for kind, _ in ends) for ends in (first, second)) or None


def fix_workspace(environ: MutableMapping[str, str] | None = None) -> None:
    """Ask cuBLAS for the fixed workspace that reproducible matrix products need, unless the user chose one.

    Read when torch first uses cuBLAS: to be called before that.
    """
    chosen = os.environ if environ is None else environ
    chosen.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
