"""Checkpoints that are on disk: which is the newest, whether it is whole, what is in it."""

import stat
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kway.checkpoints.durable import file_sum
from kway.checkpoints.folder import Place, places, step_of
from kway.checkpoints.manifest import MANIFEST, WEIGHTS, Manifest, file_of
from kway.checkpoints.state import restore
from kway.checkpoints.tensor_file import read_tensors
from kway.errors import UsageError


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint: its folder and its manifest. Tensors are read when asked for, onto the CPU."""

    path: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        """Optimizer steps taken before it."""
        return self.manifest.step

    @property
    def epoch(self) -> int:
        """The epoch of the next step, from 0."""
        return self.manifest.epoch

    def __contains__(self, part: str) -> bool:
        return part in self.manifest.parts

    def weights(self) -> dict[str, torch.Tensor]:
        """Read the weights by the model's own names; tied names share one tensor.

        Raises ``UsageError`` where the file is missing or damaged.
        """
        read, ties = self._tensors(WEIGHTS), self.manifest.ties
        for name, first in ties.items():
            # Written twice, so that the file is whole without the manifest: what differs was not one tensor.
            if not {name, first} <= read.keys() or read[name].shape != read[first].shape:
                raise UsageError(
                    f"{self.path / MANIFEST} says that {name!r} of the weights is the tensor of {first!r}",
                    f"{file_of(WEIGHTS)} does not have both, in one shape",
                )
        return {name: read[ties.get(name, name)] for name in read}

    def part(self, name: str) -> Any:
        """Read a part of the state, equal to what was saved; its tensors are the caller's own.

        Raises ``UsageError`` where there is no such part, or its file is missing or damaged.
        """
        if name not in self:
            known = ", ".join(self.manifest.parts) or "none"
            raise UsageError(f"{self.path} holds no part {name!r}", f"it has {known}")
        tensors = self._tensors(name) if file_of(name) in self.manifest.files else {}
        return restore(self.manifest.parts[name], tensors)

    def verify(self) -> None:
        """Compare every file with its checksum. Raises ``UsageError`` that names the first that differs."""
        for name, right in self.manifest.files.items():
            try:
                found = file_sum(self.path / name)
            except OSError as error:
                raise UsageError(f"{self.path / name} cannot be read ({error.strerror})") from None
            if found.size != right.size:
                raise UsageError(
                    f"{self.path / name} has {found.size} bytes", f"it was written with {right.size}"
                )
            if found != right:
                raise UsageError(
                    f"{self.path / name} was changed after it was written", "its checksum differs"
                )

    def _tensors(self, part: str) -> dict[str, torch.Tensor]:
        path = self.path / file_of(part)
        try:
            return read_tensors(path)
        except OSError as error:
            raise UsageError(f"{path} cannot be read ({error.strerror or error})") from None


def open_checkpoint(path: Path) -> Checkpoint:
    """Open the checkpoint in folder ``path``: reads its manifest and compares the sizes of its files.

    Cheap however large it is; ``Checkpoint.verify`` reads everything. Raises ``UsageError`` with the reason where it
    is not whole.
    """
    try:
        _size(path / MANIFEST)
        manifest = Manifest.from_bytes((path / MANIFEST).read_bytes(), path / MANIFEST)
        sizes = {name: _size(path / name) for name in manifest.files}
    except FileNotFoundError as error:
        raise UsageError(f"{error.filename} is missing") from None
    except OSError as error:
        raise UsageError(f"{error.filename or path} cannot be read ({error.strerror})") from None
    for name, size in sizes.items():
        if size != manifest.files[name].size:
            raise UsageError(
                f"{path / name} has {size} bytes", f"it was written with {manifest.files[name].size}"
            )
    return Checkpoint(path, manifest)


def check_step(checkpoint: Checkpoint) -> None:
    """Raise ``UsageError`` where a checkpoint lies under the name of another step's."""
    named = step_of(checkpoint.path)
    if named is not None and named != checkpoint.step:
        raise UsageError(
            f"{checkpoint.path}: its manifest says step {checkpoint.step}", f"its name says {named}"
        )


def newest(folder: Path, warn: Callable[[str], None] | None = None) -> Checkpoint | None:
    """Return the newest checkpoint in ``folder`` whose manifest and checksums hold, or ``None``.

    Each newer one that is broken is reported to ``warn`` (default: ``warnings.warn``) with the reason. Nothing in
    ``folder`` is changed, also while a writer is at work there. Raises ``UsageError`` where ``folder`` exists and
    cannot be listed.
    """
    report = warn or (lambda text: warnings.warn(text, stacklevel=4))
    told: set[str] = set()
    while True:
        try:
            found = places(folder)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise UsageError(f"{folder} cannot be listed ({error.strerror})") from None
        vanished = False
        for place in found:
            checkpoint, reason = _whole(place)
            if checkpoint is not None:
                return checkpoint
            if not place.path.exists() and not place.path.is_symlink():
                vanished = True  # a writer removed or replaced it meanwhile, so newer ones are there
                break
            if reason not in told:
                told.add(reason)
                report(f"checkpoint {place.path} is left out: {reason}")
        if not vanished:
            return None


def _whole(place: Place) -> tuple[Checkpoint | None, str]:
    try:
        checkpoint = open_checkpoint(place.path)
        check_step(checkpoint)
        checkpoint.verify()
    except UsageError as error:
        return None, str(error)
    return checkpoint, ""


def _size(path: Path) -> int:
    """Return the bytes of a file. Raises ``OSError``, and ``UsageError`` for what would be waited for when read."""
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise UsageError(f"{path} is no regular file", "", "name another checkpoint")
    return found.st_size
