"""Bring a data set here: its folder appears when all files are there and right, and one process at a time is at it."""

import fcntl
import os
import shutil
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import IO

from kway.data.download import Patience, Tell, download
from kway.data.originals import Original, original_of
from kway.errors import KwayError, UsageError
from kway.paths import check_reachable


def fetch(name: str, root: Path, tell: Tell, patience: Patience | None = None) -> bool:
    """Download the data set ``name`` into ``root``/``name``. Return whether it was not there before.

    What is downloaded lies in ``root``/.NAME.fetch until all of it is there and of the right SHA-256; a call that was
    cut off is gone on with there. ``tell``: see ``kway.data.download``. Raises ``UsageError`` for a set that is not
    downloaded or a root that cannot be written, and ``KwayError`` that says what to do by hand where no address gives
    it.
    """
    original = original_of(name)
    there = root / name
    check_reachable(f"data set {name!r}:", there)
    if _is_filled(there):
        return False
    with _alone(root, name, tell) as parts:
        if _is_filled(there):  # another process was at it
            return False
        try:
            files = [download(file, parts, tell, patience or Patience()) for file in original.files]
            _place(original, files, parts / "whole", there)
        except KwayError as error:
            raise KwayError(error.got, error.need, error.do or _by_hand(original, there)) from None
        except OSError as error:
            raise KwayError(
                f"{there} cannot be written: {error.strerror or error}", "", "make room"
            ) from None
        shutil.rmtree(parts, ignore_errors=True)
    return True


def _is_filled(folder: Path) -> bool:
    try:
        return any(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return folder.exists()  # a file in its place: it is not written over


@contextmanager
def _alone(root: Path, name: str, tell: Tell) -> Iterator[Path]:
    """Yield the folder for the parts of ``name``, which no other process has meanwhile."""
    folder = root / f".{name}.fetch"
    waited = False
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            raise UsageError(
                f"{root} cannot be written: {error.strerror or error}",
                "",
                "name another root with --data-dir",
            ) from None
        try:
            if not waited and not _locked(handle, fcntl.LOCK_NB):
                tell({"event": "notice", "text": f"another process fetches {name} to {root}: waiting for it"})
                waited = True
            if waited:
                _locked(handle, 0)
            # Whoever had it before took the folder away when it was done.
            same = False
            with suppress(FileNotFoundError):
                same = os.path.samestat(os.fstat(handle), folder.stat())
            if same:
                try:
                    yield folder
                finally:
                    with suppress(OSError):
                        folder.rmdir()  # nothing came
                return
        finally:
            os.close(handle)


def _locked(handle: int, how: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | how)
    except BlockingIOError:
        return False
    except OSError:
        # A file system without locks. Two at once would then spoil each other's parts, and SHA-256 tell it.
        return True
    return True


def _place(original: Original, files: list[Path], whole: Path, there: Path) -> None:
    """Fill the folder ``whole`` from the downloaded files, and let it be ``there``."""
    shutil.rmtree(whole, ignore_errors=True)
    whole.mkdir()
    for file in files:
        if original.members:
            _take_out(original.members, file, whole)
            continue
        # Not moved: where this is cut off, nothing is to be downloaded once more.
        with file.open("rb") as held:
            _copy(held, whole / file.name)
    whole.replace(there)


def _take_out(members: tuple[str, ...], archive: Path, folder: Path) -> None:
    """Take the named files out of a tar archive, into ``folder`` whatever the path in their names."""
    with tarfile.open(archive) as tar:
        for member in members:
            held = tar.extractfile(member)
            if held is None:
                raise KwayError(f"{archive.name}: {member} is no file")
            with held:
                _copy(held, folder / PurePosixPath(member).name)


def _copy(held: IO[bytes], to: Path) -> None:
    with to.open("wb") as out:
        shutil.copyfileobj(held, out)
        out.flush()
        os.fsync(out.fileno())


def _by_hand(original: Original, there: Path) -> str:
    urls = " ".join(file.urls[0] for file in original.files)
    unpacked = f", unpacked ({', '.join(original.members)})," if original.members else ""
    return (
        f"the same command goes on where this one stopped; without a network, put what {urls} holds{unpacked} into "
        f"{there} (see {original.home})"
    )
