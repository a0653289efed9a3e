"""What a record says beside what was computed: memory, versions, the machine."""

import platform
import resource
import sys
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

import kway
from kway.devices import cpu


def peak_memory(device: torch.device) -> int:
    """Return the most memory in bytes: allocated on a GPU, or resident in this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def versions() -> dict[str, str]:
    """Return the versions that a result depends on."""
    return {
        "kway": kway.__version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": ".".join(map(str, sys.version_info[:3])),
    }


def gpu_name(device: torch.device) -> str:
    """Return what a GPU is called; empty for a CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""


def machine(gpus: Iterable[str], **more: Any) -> dict[str, Any]:
    """Return where a record was made: see ``kway.records.Training``. ``gpus``: names of those that were used."""
    return {
        "host": platform.node(),
        "cpu": cpu.model(),
        "usable": cpu.usable_cores(),
        "gpus": sorted({name for name in gpus if name}),
        **more,
    }
