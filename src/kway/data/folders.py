"""The folder of a data set that is read from files."""

from pathlib import Path

from kway.errors import DataError
from kway.paths import check_reachable


def set_folder(name: str, data_dir: Path | None, holds: str) -> Path:
    """Return ``data_dir``/``name``. Raises ``DataError`` where it is not there; ``holds``: what it would hold."""
    if data_dir is None:
        raise DataError(
            f"data set {name!r} without a folder", "it is read from files", "pass --data-dir or set KWAY_DATA"
        )
    folder = data_dir / name
    check_reachable(f"data set {name!r}:", folder)
    if not folder.is_dir():
        raise DataError(
            f"no folder {folder}",
            f"{holds} of {name}",
            f"kway data fetch {name} brings them; or put them there, or name another root with --data-dir or KWAY_DATA",
        )
    return folder


def no_images(name: str, folder: Path, path: Path) -> DataError:
    """Return the error for a file of data set ``name`` that holds no image. ``folder``: see ``set_folder``."""
    what = "holds no images" if path.stat().st_size else "is empty"
    # A folder that is there is not fetched again.
    return DataError(
        f"{path} {what}",
        f"a whole file of {name}",
        f"remove {folder} and call kway data fetch {name}, or put the file there",
    )
