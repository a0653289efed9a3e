"""The folder of a run: made for it, never written over."""

import errno
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kway.errors import UsageError


@contextmanager
def claimed(out: Path | str | None, record: str, others: tuple[str, ...] = ()) -> Iterator[Path]:
    """Yield the folder for a stage that writes ``record`` (a file name) and ``others``.

    ``None``: a temporary folder, gone at the end. A folder that was made here is removed again where the stage
    fails before it wrote anything. Raises ``UsageError``, with nothing written, where the folder cannot be
    written or already holds one of the files.
    """
    if out is None:
        with tempfile.TemporaryDirectory(prefix="kway-") as name:
            yield Path(name)
        return
    folder = Path(out)
    made = _make(folder, (record, *others))
    try:
        yield folder
    except BaseException:
        for path in reversed(made):
            if not any(path.iterdir()):
                path.rmdir()
        raise


def _make(folder: Path, files: tuple[str, ...]) -> list[Path]:
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        for path in missing:
            if path.is_dir():
                path.rmdir()
        reason = error.strerror or errno.errorcode.get(error.errno or 0, "unknown")
        raise UsageError(
            f"out folder {folder} cannot be written: {reason}", "", "name another with --out"
        ) from None
    for name in files:
        if (folder / name).exists():
            raise UsageError(
                f"{folder} already holds {name}",
                "a record is never written over",
                "name another folder with --out",
            )
    return list(reversed(missing))
