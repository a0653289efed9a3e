"""What a record says beside what was computed: memory, versions."""

import resource
import sys

import numpy as np
import torch

import kway


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
