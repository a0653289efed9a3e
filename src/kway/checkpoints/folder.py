"""The names in a folder of checkpoints, and the renames that make each appear and disappear whole.

``step-N``: complete. ``step-N.replaced``: complete too, set aside while another of the same step takes its place.
``.step-N-RANDOM.part``: being written or being removed; of no use to a reader.
"""

import re
import shutil
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kway.checkpoints.durable import is_locked, sync_folder
from kway.checkpoints.manifest import MANIFEST, WEIGHTS, file_of
from kway.errors import UsageError

_COMPLETE = re.compile(r"step-(0|[1-9][0-9]*)(\.replaced)?")
_PARTIAL = re.compile(r"\.step-[0-9]+-[0-9a-f]{12}\.part")
# Where a file system has no locks, an unfinished folder that nobody touched for so long is a dead run's.
_ABANDONED_S = 3600


@dataclass(frozen=True, order=True)
class Place:
    """A name that a complete checkpoint bears; ``newer`` ones compare larger."""

    step: int
    in_place: bool
    path: Path


def places(folder: Path) -> list[Place]:
    """List the names of complete checkpoints in ``folder``, newest step first. Raises ``OSError``."""
    found = []
    for path in folder.iterdir():
        match = _COMPLETE.fullmatch(path.name)
        if match:
            found.append(Place(int(match[1]), match[2] is None, path))
    return sorted(found, reverse=True)


def step_of(path: Path) -> int | None:
    """Return the step that a folder's name says, or ``None`` where it is no name of kway's."""
    match = _COMPLETE.fullmatch(path.absolute().name)
    return int(match[1]) if match else None


def final(folder: Path, step: int) -> Path:
    """Return the path of the complete checkpoint of ``step``."""
    return folder / f"step-{step}"


def partial(folder: Path, step: int) -> Path:
    """Return a fresh path for a checkpoint that is being written or removed."""
    return folder / f".step-{step}-{uuid.uuid4().hex[:12]}.part"


def is_own(path: Path) -> bool:
    """Whether ``path`` is a checkpoint that kway wrote there: a folder, no link, with a manifest.

    Only those are ever replaced or removed.
    """
    return path.is_dir() and not path.is_symlink() and (path / MANIFEST).is_file()


def check_free(folder: Path, step: int) -> None:
    """Raise ``UsageError`` where something that kway did not write bears the name of ``step``'s checkpoint."""
    path = final(folder, step)
    if (path.exists() or path.is_symlink()) and not is_own(path):
        raise UsageError(f"{path} exists", "it is no checkpoint that kway may replace", "move it away")


def publish(part: Path, folder: Path, step: int) -> None:
    """Give the complete folder ``part`` its final name, durably; a checkpoint of the same step is replaced.

    At every moment a complete checkpoint of the step stands under a name that readers know. Raises ``OSError`` and
    ``UsageError``, the old one being where it was.
    """
    path = final(folder, step)
    aside = path.with_name(path.name + ".replaced")
    check_free(folder, step)
    replaces = path.exists()
    if replaces:
        path.rename(aside)
    try:
        part.rename(path)
    except OSError:
        if replaces:
            aside.rename(path)
        raise
    sync_folder(folder)
    if replaces:
        with suppress(OSError):  # the new one is there; the next save tries again
            discard(aside, step)


def settle(folder: Path) -> None:
    """Finish replacements that a run began and did not live to finish, and remove what dead runs left unfinished.

    For writers only: what a reader takes for abandoned may be a writer's. Raises ``OSError``.
    """
    for place in places(folder):
        if place.in_place or not is_own(place.path):
            continue
        if is_own(final(folder, place.step)):
            discard(place.path, place.step)
        elif not final(folder, place.step).exists():
            place.path.rename(final(folder, place.step))
    for path in folder.iterdir():
        if _PARTIAL.fullmatch(path.name) and path.is_dir() and not path.is_symlink() and _is_abandoned(path):
            shutil.rmtree(path, ignore_errors=True)


def discard(path: Path, step: int) -> None:
    """Remove a complete checkpoint: its name first, so that nothing half-removed ever bears it.

    Raises ``OSError``.
    """
    part = partial(path.parent, step)
    path.rename(part)
    shutil.rmtree(part)


def _is_abandoned(part: Path) -> bool:
    locked = is_locked(part / file_of(WEIGHTS))
    if locked is not None:
        return not locked
    with suppress(OSError):
        return time.time() - part.stat().st_mtime > _ABANDONED_S
    return False
