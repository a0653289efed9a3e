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

from kway.errors import UsageError

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
    """Read what ``to_bytes`` gave, or any safetensors file.

    Raises ``OSError`` and ``SafetensorError``, and ``UsageError`` where its metadata has another meaning than here.
    """
    with safe_open(path, framework="pt") as file:
        named = (file.metadata() or {}).get(_PAIRS, "[]")
        state: dict[str, torch.Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    try:
        for name in json.loads(named):
            # A copy: the file aligns numbers to 8 bytes, and torch reads complex ones of 16 as if aligned to 16.
            state[name] = torch.view_as_complex(state[name].clone())
    except (ValueError, KeyError, TypeError, RuntimeError) as error:
        raise UsageError(
            f"{path} has {_PAIRS!r} in its metadata, which here names tensors of complex numbers as pairs of reals",
            f"what it says there fits none ({type(error).__name__})",
            "take it out, or name another file",
        ) from None
    return state
