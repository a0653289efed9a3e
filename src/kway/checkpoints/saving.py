"""One checkpoint, written so that it is there whole or not at all; and the removal of those it makes superfluous."""

import shutil
from contextlib import ExitStack
from pathlib import Path

from kway.checkpoints.durable import DurableFile, Sum, sync_folder
from kway.checkpoints.folder import check_free, discard, is_own, partial, places, publish, settle
from kway.checkpoints.manifest import MANIFEST, WEIGHTS, Manifest, file_of
from kway.checkpoints.reading import open_checkpoint
from kway.checkpoints.snapshot import Frozen
from kway.checkpoints.tensor_file import write_tensors
from kway.errors import UsageError


def write_checkpoint(folder: Path, frozen: Frozen) -> Path:
    """Write ``folder/step-N`` and return its path. When this returns, it outlives a loss of power.

    ``folder`` is made where only it is missing. What dead runs left unfinished there is removed first. On an error
    nothing of this checkpoint remains, and the others are untouched. Raises ``OSError`` and ``UsageError``.
    """
    if not folder.is_dir():
        folder.mkdir()
        sync_folder(folder.parent)
    settle(folder)
    check_free(folder, frozen.step)
    part = partial(folder, frozen.step)
    with ExitStack() as until_published:
        try:
            part.mkdir()
            files: dict[str, Sum] = {}
            # The weights come first: their file's lock tells other writers that this folder is alive.
            for name, copy in frozen.files.items():
                copy.wait()
                tensors = dict(copy.tensors)
                if name == WEIGHTS:
                    tensors.update({tied: tensors[first] for tied, first in frozen.ties.items()})
                file = DurableFile(part / file_of(name))
                until_published.callback(file.close)
                with file:
                    write_tensors(file, tensors)
                files[file_of(name)] = file.sum
            manifest = Manifest(frozen.step, frozen.epoch, frozen.parts, frozen.ties, files)
            last = DurableFile(part / MANIFEST)
            until_published.callback(last.close)
            with last:
                last.write(manifest.to_bytes())
            sync_folder(part)
            publish(part, folder, frozen.step)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise
    return folder / f"step-{frozen.step}"


def remove_older(folder: Path, step: int, keep: int) -> list[str]:
    """Keep the durable checkpoint of ``step`` and the ``keep`` - 1 newest whole ones before it; remove older ones.

    What kway did not write (links, folders without a manifest) and later steps stay. Returns a line for each that
    could not be removed. Raises ``OSError`` where ``folder`` cannot be listed.
    """
    problems, kept = [], 1
    for place in places(folder):
        if place.step >= step or not place.in_place or not is_own(place.path):
            continue
        if kept >= keep:
            try:
                discard(place.path, place.step)
            except OSError as error:
                problems.append(f"checkpoint {place.path} could not be removed ({error.strerror})")
        elif _is_whole(place.path):
            kept += 1
    return problems


def _is_whole(path: Path) -> bool:
    try:
        open_checkpoint(path)
    except UsageError:
        return False
    return True
