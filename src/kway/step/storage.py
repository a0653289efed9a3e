"""Tensors on disk, by name, in safetensors files. Nothing in a file depends on the run.

The format has no 128-bit complex numbers: they lie there as pairs of reals, shape (..., 2), and the file's
metadata names them. It also says which tensors the model made when it first ran (``kway.step.made``): a copy that has
not run lacks them.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save

from kway.errors import UsageError

_PAIRS, _MADE = "complex128", "made"


def to_bytes(state: Mapping[str, torch.Tensor], made: Mapping[str, str] | None = None) -> bytes:
    """Return the content of a safetensors file with these CPU tensors. Tensors may share memory.

    ``made``: which of them the model made when it first ran.
    """
    pairs = sorted(name for name, value in state.items() if value.dtype == torch.complex128)
    plain = {
        name: (torch.view_as_real(value.resolve_conj()) if name in pairs else value).clone(
            memory_format=torch.contiguous_format
        )
        for name, value in state.items()
    }
    metadata = {_PAIRS: json.dumps(pairs)} if pairs else None
    if kinds := {name: kind for name, kind in sorted((made or {}).items()) if name in state}:
        # One entry: the order of several would change from one process to the next.
        metadata = {_MADE: json.dumps({_MADE: kinds, _PAIRS: pairs})}
    return save(plain, metadata)


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Read what ``to_bytes`` gave, or any safetensors file.

    Raises ``OSError`` and ``SafetensorError``, and ``UsageError`` where its metadata has another meaning than here.
    """
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
        state: dict[str, torch.Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    try:
        for name in _said(metadata).get(_PAIRS) or json.loads(metadata.get(_PAIRS, "[]")):
            # A copy: the file aligns numbers to 8 bytes, and torch reads complex ones of 16 as if aligned to 16.
            state[name] = torch.view_as_complex(state[name].clone())
    except (ValueError, KeyError, TypeError, RuntimeError) as error:
        raise UsageError(
            f"{path} has {_PAIRS!r} in its metadata, which here names tensors of complex numbers as pairs of reals",
            f"what it says there fits none ({type(error).__name__})",
            "take it out, or name another file",
        ) from None
    return state


def read_made(path: Path) -> dict[str, str]:
    """Read which tensors of a file that can be read the model made when it first ran: see ``kway.step.made``."""
    with safe_open(path, framework="pt") as file:
        found = _said(file.metadata() or {}).get(_MADE)
    return {str(name): str(kind) for name, kind in found.items()} if isinstance(found, dict) else {}


def _said(metadata: Mapping[str, str]) -> dict[str, Any]:
    try:
        found = json.loads(metadata.get(_MADE, "{}"))
    except ValueError:  # of another writer, who means something else by it
        return {}
    return found if isinstance(found, dict) else {}
