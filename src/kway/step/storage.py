"""Tensors on disk, by name, in safetensors files. Nothing in a file depends on the run.

The format has no 128-bit complex numbers: they lie there as pairs of reals, shape (..., 2), and the file's
metadata names them.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save

_PAIRS = "complex128"


def to_bytes(state: Mapping[str, torch.Tensor]) -> bytes:
    """Return the content of a safetensors file with these CPU tensors. Tensors may share memory."""
    pairs = sorted(name for name, value in state.items() if value.dtype == torch.complex128)
    plain = {
        name: (torch.view_as_real(value.resolve_conj()) if name in pairs else value).contiguous().clone()
        for name, value in state.items()
    }
    return save(plain, {_PAIRS: json.dumps(pairs)} if pairs else None)


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Read what ``to_bytes`` gave, or any safetensors file. Raises ``OSError`` and ``SafetensorError``."""
    with safe_open(path, framework="pt") as file:
        pairs = json.loads((file.metadata() or {}).get(_PAIRS, "[]"))
        state: dict[str, torch.Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    # A copy: the file aligns numbers to 8 bytes, and torch reads complex ones of 16 as if they were aligned to 16.
    return {name: torch.view_as_complex(v.clone()) if name in pairs else v for name, v in state.items()}
