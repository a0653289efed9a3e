"""What ``kway devices --attributes`` shows: each device in detail, by the name that torch has for it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from kway.devices import cpu_attributes, gpu_attributes, mps, rocm_attributes
from kway.devices.cpu import ROOT
from kway.records import Cluster


def describe(
    cluster: Cluster,
    root: Path = ROOT,
    of_nvidia: Callable[[], list[dict[str, Any]]] = gpu_attributes.read,
    host: mps.Host | None = None,
) -> dict[str, dict[str, Any]]:
    """Return attributes by device: ``cpu``, visible GPUs (``cuda:0``, ...), ``mps``. What is not told is left out."""
    found = {"cpu": cpu_attributes.read(root, host)}
    if cluster.gpus:
        # CUDA lists what is visible, AMD's driver all.
        amd = cluster.torch["hip"]
        cards = rocm_attributes.read(root) if amd else of_nvidia()
        for gpu in cluster.gpus:
            place = gpu["physical"] if amd else gpu["index"]
            found[f"cuda:{gpu['index']}"] = cards[place] if place < len(cards) else {}
    if cluster.mps is not None:
        found["mps"] = mps.attributes(host)
    return found
