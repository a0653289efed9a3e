"""What a checkpoint is made of, and the moment at which it is taken."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from kway.checkpoints.copies import Copies, Copy
from kway.checkpoints.manifest import WEIGHTS, check_part
from kway.checkpoints.state import check_storable, flatten, identity
from kway.checkpoints.tensor_file import check_name
from kway.errors import UsageError


@dataclass(frozen=True)
class Snapshot:
    """The state of a run between two steps, as it lives in memory.

    ``step``: optimizer steps taken so far. ``epoch``: that of the next step, from 0. ``weights``: what a bare
    model's ``load_state_dict`` takes, under the model's own names. ``parts``: any other state by name, each as
    ``state.flatten`` takes it (``positions``, ``buffers`` that are not persistent, ``optimizer``, ``ema``,
    ``schedule``, ``scaler``, ``plan``, ...); a part that holds tensors gets a file of its own.
    """

    step: int
    epoch: int
    weights: Mapping[str, torch.Tensor]
    parts: Mapping[str, Any]


@dataclass(frozen=True)
class Frozen:
    """A snapshot that training no longer changes: its tensors are copies. ``files``: copies by part."""

    step: int
    epoch: int
    parts: dict[str, Any]
    ties: dict[str, str]
    files: dict[str, Copy]

    @property
    def size(self) -> int:
        """Bytes of all tensors, as files hold them."""
        return sum(
            t.numel() * t.element_size() for copy in self.files.values() for t in copy.tensors.values()
        )


def freeze(snapshot: Snapshot, copies: dict[str, Copies]) -> Frozen:
    """Copy a snapshot. ``copies`` holds the memory of the last time, by part, and is used again.

    Raises ``UsageError`` that names the place of what a checkpoint cannot hold; nothing is copied then.
    """
    for name, number in (("step", snapshot.step), ("epoch", snapshot.epoch)):
        if type(number) is not int or number < 0:
            raise UsageError(f"a snapshot with {name} {number!r}", "it counts from 0")
    ties = _ties(snapshot.weights)
    parts, tensors = {}, {WEIGHTS: {n: t for n, t in snapshot.weights.items() if n not in ties}}
    for part, state in snapshot.parts.items():
        check_part(part)
        parts[part], held = flatten(state, part)
        if held:
            tensors[part] = held
    files = {part: copies.setdefault(part, Copies()).take(held) for part, held in tensors.items()}
    return Frozen(snapshot.step, snapshot.epoch, parts, ties, files)


def _ties(weights: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Map each name whose tensor an earlier name has already to that name."""
    first: dict[tuple[Any, ...], str] = {}
    ties = {}
    for name, tensor in weights.items():
        check_name(name)
        if not isinstance(tensor, torch.Tensor):
            raise UsageError(
                f"weights[{name!r}] is a {type(tensor).__qualname__}",
                "weights are tensors",
                "put other state into a part",
            )
        check_storable(tensor, f"weights[{name!r}]")
        known = first.setdefault(identity(tensor), name)
        if known != name:
            ties[name] = known
    return ties
