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


class Prepared:
    """A snapshot that was looked through and is not copied yet: its tensors are those that training changes.

    Most of the time that a snapshot takes the host goes here, and none of it needs to know what the tensors hold: a
    device may still be at work on them. Raises ``UsageError`` that names the place of what a checkpoint cannot hold.
    """

    def __init__(self, snapshot: Snapshot) -> None:
        _check_counts(snapshot)
        self.step, self.epoch = snapshot.step, snapshot.epoch
        self._ties = _ties(snapshot.weights)
        self._parts: dict[str, Any] = {}
        self._tensors = {WEIGHTS: {n: t for n, t in snapshot.weights.items() if n not in self._ties}}
        for part, state in snapshot.parts.items():
            self.add(part, state)

    def add(self, part: str, state: Any) -> None:
        """Add a part that was not known before. Raises as the class does."""
        check_part(part)
        self._parts[part], held = flatten(state, part)
        if held:
            self._tensors[part] = held

    def ready(self, copies: dict[str, Copies]) -> None:
        """Have the memory for ``freeze``. Raises ``RuntimeError`` where there is too little."""
        for part, held in self._tensors.items():
            copies.setdefault(part, Copies()).ready(held)

    def freeze(self, copies: dict[str, Copies]) -> Frozen:
        """Copy it. ``copies`` holds the memory of the last time, by part, and is used again."""
        files = {part: copies.setdefault(part, Copies()).take(held) for part, held in self._tensors.items()}
        return Frozen(self.step, self.epoch, self._parts, self._ties, files)


def freeze(snapshot: Snapshot, copies: dict[str, Copies]) -> Frozen:
    """Copy a snapshot: see ``Prepared``, which raises before anything is copied."""
    return Prepared(snapshot).freeze(copies)


def _check_counts(snapshot: Snapshot) -> None:
    for name, number in (("step", snapshot.step), ("epoch", snapshot.epoch)):
        if type(number) is not int or number < 0:
            raise UsageError(f"a snapshot with {name} {number!r}", "it counts from 0")


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
