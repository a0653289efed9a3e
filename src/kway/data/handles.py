"""What a copy of data holds in place of what cannot be copied: a file that is opened anew, or the thing itself."""

import gc
import io
import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch

# What has nothing below it that a copy could trip over.
_PLAIN = (
    *(str, bytes, int, float, bool, complex, type(None), type),
    *(FunctionType, BuiltinFunctionType, ModuleType, torch.Tensor),
)
_CONTAINERS = (dict, list, tuple, set, frozenset)


def stand_ins(data: Any, known: dict[int, Any], by_index: bool) -> dict[int, Any]:
    """Return by the id of each handle that ``data`` reaches what a copy is to hold in its place.

    A file of the disk that is open to be read is opened anew, and stands where it stands. Where samples are asked for
    ``by_index``, what else cannot be copied is shared (locks, connections, HDF5 files): to read one sample there
    changes nothing for the next. What hands out one thing after the other (a generator, a cursor) keeps a place that
    nobody else may move, and stands for nothing: the copy fails. ``known``: ids that a copy does not look into.
    """
    found: dict[int, Any] = {}
    waiting, seen = [data], set(known)
    while waiting:
        value = waiting.pop()
        if isinstance(value, _PLAIN) or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, io.IOBase):
            with suppress(OSError, ValueError):
                found[id(value)] = _opened_anew(value)
        elif _can_be_copied(value):
            waiting += gc.get_referents(value)
        elif by_index and not isinstance(value, Iterator):
            found[id(value)] = value
    return found


def _can_be_copied(value: Any) -> bool:
    """Whether an object says itself how it is copied; what it holds may still not."""
    if isinstance(value, _CONTAINERS) or hasattr(value, "__deepcopy__"):
        return True
    if isinstance(value, np.ndarray):
        return True
    try:
        value.__reduce_ex__(4)
    except Exception:
        return False
    return True


def _opened_anew(file: io.IOBase) -> io.IOBase:
    """Open the file of an open file once more, at its place. Raises ``OSError`` or ``ValueError`` where that cannot be.

    Not of one that is written to, and of none that makes its bytes itself, as those of archives do.
    """
    if isinstance(file, io.TextIOWrapper):
        below: Any = _opened_anew(file.buffer)
        text = io.TextIOWrapper(below, file.encoding, file.errors, line_buffering=file.line_buffering)
        text.seek(file.tell())
        return text
    if type(file) not in (io.BufferedReader, io.FileIO) or file.writable():
        raise ValueError(f"a {type(file).__name__} is not opened anew")
    descriptor = file.fileno()
    known = os.fstat(descriptor)
    if not stat.S_ISREG(known.st_mode):
        raise ValueError("no file of the disk")
    path = Path(str(file.name))  # type: ignore[attr-defined]
    if not _leads_to(path, known):
        # It was renamed or removed. The data may use its name, so that this is only the second way.
        path = Path(f"/proc/self/fd/{descriptor}")
        if not _leads_to(path, known):
            raise ValueError(f"{file.name} is another file by now")  # type: ignore[attr-defined]
    new = path.open("rb", buffering=0) if isinstance(file, io.FileIO) else path.open("rb")
    new.seek(file.tell())
    return new


def _leads_to(path: Path, known: os.stat_result) -> bool:
    with suppress(OSError, ValueError):
        return os.path.samestat(path.stat(), known)
    return False
