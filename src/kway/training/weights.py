"""Weights on disk, and their fingerprint."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from kway.checkpoints.names import own_weights
from kway.flat import flat
from kway.records import write_atomically
from kway.step.storage import to_bytes


def unique_names(model: nn.Module) -> list[str]:
    """List the sorted own names of a model's state, with tied tensors named once (by their first name)."""
    seen: set[tuple[int, int, tuple[int, ...]]] = set()
    names = []
    for name, value in sorted(own_weights(model, model.state_dict(keep_vars=True)).items()):
        place = (value.untyped_storage().data_ptr(), int(value.storage_offset()), tuple(value.shape))
        if value.numel() and place in seen:
            continue
        seen.add(place)
        names.append(name)
    return names


def fingerprint(state: dict[str, torch.Tensor], names: list[str]) -> str:
    """Return the SHA-256 over names, dtypes, shapes and little-endian bytes of ``state``, in the order of names."""
    digest = hashlib.sha256()
    for name in names:
        value = state[name].cpu()
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        digest.update(flat(value).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def save_weights(state: dict[str, torch.Tensor], path: Path, made: Mapping[str, str] | None = None) -> None:
    """Write ``state`` to a safetensors file, complete or not at all, with nothing in it that depends on the run.

    ``made``: what the model made of it when it first ran, so that a copy that has not run can take it.
    """
    write_atomically(path, to_bytes(state, made))


def save_last(
    folder: Path,
    state: dict[str, torch.Tensor],
    average: dict[str, torch.Tensor] | None,
    made: Mapping[str, str],
) -> None:
    """Write the last weights of a run into its ``folder``, and their moving average where there is one."""
    save_weights(state, folder / "weights.safetensors", made)
    if average is not None:
        save_weights(average, folder / "ema.safetensors", made)
