"""What a copy of data holds in place of what cannot be copied: a file that is opened anew, or the thing itself."""

import gc
import io
import os
import stat
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any
from zipfile import BadZipFile

import torch
from numpy.lib.npyio import NpzFile

# What has nothing below it that a copy could trip over.
_PLAIN = (
    *(str, bytes, int, float, bool, complex, type(None), type),
    *(FunctionType, BuiltinFunctionType, ModuleType, torch.Tensor),
)
# What keeps nothing that reading a sample by its index would change. Only these types themselves: one derived from them
# may keep more. Of packages that an installation may lack, or that few import, by name.
_LOCKS = (type(threading.Lock()), type(threading.RLock()))
_SHARED = {
    "h5py": ("File", "Group", "Dataset"),
    "sqlite3": ("Connection",),
    "multiprocessing": ("Lock", "RLock"),
}


def stand_ins(data: Any, source: Any, known: Mapping[int, Any], by_index: bool) -> dict[int, Any]:
    """Return by the id of each handle that ``data`` reaches what a copy is to hold in its place.

    A file of the disk that is open to be read, and numpy's archive of arrays over one, is opened anew, and stands where
    it stands; not a text file, which does not tell what it was given as ``newline``. Where samples are asked for
    ``by_index``, locks, connections of sqlite3 and what HDF5 files are read by are shared: to read one sample there
    changes nothing for the next. All else that cannot be copied may keep a state or a place that nobody else may move,
    and stands for nothing: the copy fails. ``source``, whose samples are asked for, never stands for itself.
    ``known``: ids that a copy does not look into.
    """
    found: dict[int, Any] = {}
    waiting, seen = [data], set(known)
    while waiting:
        value = waiting.pop()
        # Of a value itself nothing is asked: it may raise whatever it is asked for, as numpy's `NpzFile.f` does.
        kind = type(value)
        if issubclass(kind, _PLAIN) or id(value) in seen:
            continue
        seen.add(id(value))
        if kind in _OPENED:
            with suppress(OSError, ValueError, BadZipFile):
                found[id(value)] = _OPENED[kind](value)
        elif by_index and value is not source and _is_shared(kind):
            found[id(value)] = value
        else:
            waiting += gc.get_referents(value)
    return found


def _is_shared(kind: type) -> bool:
    package = str(kind.__module__).partition(".")[0]
    return kind in _LOCKS or kind.__name__ in _SHARED.get(package, ())


def _arrays_anew(arrays: Any) -> NpzFile:
    """Open what ``np.load`` gives for an archive once more. Raises as ``_opened_anew``, and ``BadZipFile``."""
    file = getattr(arrays.zip, "fp", None)
    if type(file) is not io.BufferedReader:
        raise ValueError("no archive that is open on the disk")
    return NpzFile(
        _opened_anew(file),
        own_fid=True,
        allow_pickle=arrays.allow_pickle,
        pickle_kwargs=arrays.pickle_kwargs,
        max_header_size=arrays.max_header_size,
    )


def _opened_anew(file: io.BufferedReader | io.FileIO) -> Any:
    """Open the file of an open file once more, at its place. Raises ``OSError`` or ``ValueError`` where that cannot be.

    Not of one that is written to.
    """
    if file.writable():
        raise ValueError("a file that is written to is not opened anew")
    descriptor = file.fileno()
    known = os.fstat(descriptor)
    if not stat.S_ISREG(known.st_mode):
        raise ValueError("no file of the disk")
    path = Path(str(file.name))
    if not _leads_to(path, known):
        # It was renamed or removed. The data may use its name, so that this is only the second way.
        path = Path(f"/proc/self/fd/{descriptor}")
        if not _leads_to(path, known):
            raise ValueError(f"{file.name} is another file by now")
    new = path.open("rb", buffering=0) if isinstance(file, io.FileIO) else path.open("rb")
    new.seek(file.tell())
    return new


def _leads_to(path: Path, known: os.stat_result) -> bool:
    with suppress(OSError, ValueError):
        return os.path.samestat(path.stat(), known)
    return False


_OPENED: Mapping[type, Callable[[Any], Any]] = {
    io.BufferedReader: _opened_anew,
    io.FileIO: _opened_anew,
    NpzFile: _arrays_anew,
}
