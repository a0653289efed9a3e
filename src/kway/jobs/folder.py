"""The folder of a run: made for it, held by it, never written over."""

import errno
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

from kway.checkpoints.hold import Hold
from kway.errors import UsageError
from kway.job import check_path
from kway.launch.temporary import temporary_folder


@contextmanager
def claimed(
    out: Path | str | None, record: str, others: tuple[str, ...] = (), *, alone: bool = True
) -> Iterator[Path]:
    """Yield the folder for a stage that writes ``record`` (a file name) and ``others``.

    ``None``: a temporary folder, gone at the end. A folder that was made here is removed again where the stage
    fails before it wrote anything. ``alone``: no other stage that wants to be alone gets the folder while the block
    runs. Raises ``UsageError``, with nothing written, where the folder cannot be written, another run is at work in
    it, or it already holds one of the files.
    """
    if out is None:
        with temporary_folder() as folder:
            yield folder
        return
    check_path("out", out)
    folder = Path(out)
    made, hold = _made(folder, alone)
    try:
        check_free(folder, (record, *others))
        yield folder
    except BaseException:
        _remove_empty(made)
        raise
    finally:
        if hold is not None:
            hold.close()


def is_there(path: Path) -> bool:
    """Whether something bears this name; a name that no file can have is not there."""
    try:
        return path.exists()
    except OSError:
        return False


def _made(folder: Path, alone: bool) -> tuple[list[Path], Hold | None]:
    """Make the folder; return what was missing, innermost first, and the hold on it."""
    missing = [path for path in (folder, *folder.parents) if not is_there(path)]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
        # Not taken away again where this is refused: it is the other run's.
        return missing, Hold(folder) if alone else None
    except OSError as error:
        _remove_empty(missing)
        raise UsageError(
            f"out folder {folder} cannot be written: {_reason(folder, error)}",
            "",
            "name another with out= (--out)",
        ) from None


def _reason(folder: Path, error: OSError) -> str:
    if isinstance(error, FileExistsError):
        for path in (folder, *folder.parents):
            if path.is_symlink() and not path.exists():
                return f"{path} is a link to {path.readlink()}, which is not there"
    return error.strerror or errno.errorcode.get(error.errno or 0, "unknown")


def _remove_empty(made: list[Path]) -> None:
    for path in made:
        # Also where somebody removed or renamed it meanwhile: what went wrong first is what counts.
        with suppress(OSError):
            path.rmdir()


def check_free(folder: Path, files: tuple[str, ...]) -> None:
    """Raise ``UsageError`` where the folder holds one of the files."""
    for name in files:
        if is_there(folder / name):
            raise UsageError(
                f"{folder} already holds {name}",
                "a record is never written over",
                "name another folder with out= (--out)",
            )


def logs_of(folder: Path) -> Path:
    """Make the folder for the logs of a start of the run in ``folder``. Those of earlier starts stay."""
    own = folder / "logs"
    starts = (own if number == 1 else own / f"start-{number}" for number in count(1))
    chosen = next(path for path in starts if not (path / "rank-0.log").exists())
    chosen.mkdir(parents=True, exist_ok=True)
    return chosen
