"""Pickles of plain data, read without running anything that they name.

A pickle is a program: it may call whatever it can import. This reader imports nothing. What a pickle of lists, dicts,
texts, bytes and numbers never asks for is refused; what one of numpy arrays asks for is a stand-in, which
takes bytes, a type and a shape, and checks them before numpy sees them.
"""

import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kway.errors import DataError

# Numbers of up to 8 bytes: no objects, no text, no structures.
_KINDS = {f"{kind}{size}" for kind in "iu" for size in (1, 2, 4, 8)} | {"b1", "f2", "f4", "f8"}


def read(path: Path) -> Any:
    """Return the lists, dicts, tuples, texts, bytes, numbers and arrays (``Held``) that a pickle holds.

    Texts of Python 2 come as bytes. Raises ``DataError`` for a pickle that names anything else, or is damaged.
    """
    try:
        with path.open("rb") as file:
            return _Reader(file, encoding="bytes").load()
    except DataError as error:
        raise DataError(
            f"{path} {error.got}", "a pickle of plain data and arrays of numbers", error.do
        ) from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}", "a whole file", "get the file again") from None
    # A damaged pickle may raise almost anything, out of the interpreter of its instructions.
    except Exception as error:
        raise DataError(
            f"{path} is no pickle that can be read ({type(error).__name__}: {error})",
            "a whole file",
            "get the file again",
        ) from None


class _Sealed:
    """A thing that a pickle can get hold of, and give no state."""

    __slots__ = ()

    def __setstate__(self, state: Any) -> None:
        raise DataError("gives state to what has none")


class Held(_Sealed):
    """An array of numbers, ``array``; ``None`` until the pickle has said what is in it."""

    __slots__ = ("array",)

    def __init__(self) -> None:
        self.array: npt.NDArray[Any] | None = None

    def __setstate__(self, state: Any) -> None:
        """Take (version, shape, type, whether in Fortran's order, bytes), as numpy writes it."""
        match state:
            case (int(), shape, kind, int() as fortran, content):
                self.fill(shape, kind, "F" if fortran else "C", content)
            case _:
                raise DataError("holds an array that is not made of numbers")

    def fill(self, shape: Any, kind: Any, order: Any, content: Any) -> None:
        """Make the array. Raises ``DataError`` unless all of it fits together."""
        if (
            not isinstance(shape, tuple)
            or not isinstance(kind, _Type)
            or not isinstance(content, bytes | bytearray)
        ):
            raise DataError("holds an array that is not made of numbers")
        if len(shape) > 8 or not all(type(size) is int and size >= 0 for size in shape):
            raise DataError(f"holds an array of shape {shape}")
        dtype = kind.dtype()
        if math.prod(shape) * dtype.itemsize != len(content):
            raise DataError(f"holds {len(content)} bytes for an array of {dtype} and shape {shape}")
        # A copy: an array over bytes could not be written to.
        found = np.frombuffer(content, dtype).reshape(shape, order="F" if _text(order) == "F" else "C").copy()
        self.array = found.astype(dtype.newbyteorder("="), copy=False)


class _Type(_Sealed):
    __slots__ = ("_code", "_order")

    def __init__(self, code: str) -> None:
        self._code, self._order = code, "<"

    def __setstate__(self, state: Any) -> None:
        order = _text(state[1]) if isinstance(state, tuple) and len(state) > 1 else ""
        if order not in ("<", ">", "|", "="):
            raise DataError("holds an array of a type that is no number")
        self._order = order

    def dtype(self) -> np.dtype[Any]:
        return np.dtype(self._order + self._code)


class _Callable(_Sealed):
    __slots__ = ("_function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *arguments: Any) -> Any:
        return self._function(*arguments)


def _empty(*_: Any) -> Held:
    return Held()


def _whole(content: Any, kind: Any, shape: Any, order: Any) -> Held:
    found = Held()
    found.fill(shape, kind, order, content)
    return found


def _type(code: Any, *_: Any) -> _Type:
    if _text(code) not in _KINDS:
        raise DataError(f"holds an array of type {str(code)[:40]}")
    return _Type(_text(code))


def _encoded(text: Any, encoding: Any) -> bytes:
    # How Python 3 writes bytes for readers of Python 2.
    if not isinstance(text, str) or _text(encoding) not in ("latin1", "latin-1"):
        raise DataError("encodes what are no bytes")
    return text.encode("latin-1")


def _text(value: Any) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else str(value)


class _Reader(pickle.Unpickler):
    """Finds stand-ins for what numpy writes, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a stand-in. Raises ``DataError`` for any other name."""
        match module, name:
            case ("numpy.core.multiarray" | "numpy._core.multiarray", "_reconstruct"):
                return _Callable(_empty)
            case ("numpy.core.numeric" | "numpy._core.numeric", "_frombuffer"):
                return _Callable(_whole)
            case ("numpy", "ndarray"):
                return _Sealed()
            case ("numpy", "dtype"):
                return _Callable(_type)
            case ("_codecs", "encode"):
                return _Callable(_encoded)
        raise DataError(
            f"names {module}.{name}"[:120], "", "do not load it: it is none of the data set's files"
        )

    def persistent_load(self, pid: Any) -> Any:
        """Refuse what would be looked up elsewhere."""
        raise DataError("refers to what is not in it")
