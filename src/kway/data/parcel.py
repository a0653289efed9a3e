"""What travels between a rank and its loader workers: the reader, once, and exceptions."""

import pickle
import traceback
from collections import ChainMap
from collections.abc import Callable
from io import BytesIO
from multiprocessing.reduction import ForkingPickler
from typing import Any, Protocol

import cloudpickle
import torch
from torch.utils.data import Dataset, get_worker_info

from kway.by_value import Pickler
from kway.errors import text_of


class Reader(Protocol):
    """What runs in a worker: answers a request, which says of which epoch and step it is."""

    @property
    def dataset(self) -> Any:
        """The user's data set."""

    def fetch(self, request: Any) -> Any:
        """Return the answer to one request."""


def dumped(value: Any) -> bytes:
    """Pickle what the user may have written anywhere: lambdas, classes of ``__main__`` and of a file too."""
    out = BytesIO()
    Pickler(out, protocol=5).dump(value)
    return out.getvalue()


def _dumped_by_value(value: Any) -> bytes:
    """Pickle an answer with classes that cannot be imported here; tensors are in shared memory all the same."""
    out = BytesIO()
    pickler = Pickler(out, protocol=5)
    pickler.dispatch_table = ChainMap(ForkingPickler._extra_reducers, pickler.dispatch_table)  # type: ignore[attr-defined]
    pickler.dump(value)
    return out.getvalue()


class Parcel(Dataset[Any]):
    """A pickled reader, opened in the worker."""

    def __init__(self, content: bytes) -> None:
        self.content, self.dtype = content, torch.get_default_dtype()
        self.reader: Reader | None = None

    def open(self) -> Callable[[int], None] | None:
        """Unpack the reader, in the worker; return the user's ``worker_init_fn``."""
        torch.set_default_dtype(self.dtype)  # what a data set makes must not depend on the number of workers
        self.reader, init = pickle.loads(self.content)
        self.content = b""
        return init  # type: ignore[no-any-return]

    def __getitem__(self, request: Any) -> Any:
        """Return the reader's answer as an ``Answer``, or the exception that was raised as a ``Failure``."""
        assert self.reader is not None
        try:
            return Answer(self.reader.fetch(request))
        except Exception as error:
            info = get_worker_info()
            where = f"loader worker {info.id if info else 0}, epoch {request.epoch}, step {request.step}"
            return Failure(error, where)


class Answer:
    """What a worker answers, pickled already: tensors are in shared memory.

    Torch pickles in a thread of its queue. What fails there, for want of shared memory or because something
    cannot be pickled, is printed and lost, and the rank waits for ever.
    """

    def __init__(self, value: Any) -> None:
        try:
            self.content: Any = bytes(ForkingPickler.dumps(value))
        except (pickle.PicklingError, AttributeError):
            # Of a class that only the user's script knows: it came here with the data set, by value.
            self.content = _dumped_by_value(value)
        self.value: Any = None

    def open(self) -> None:
        """Make ``value``, in the rank."""
        self.value, self.content = pickle.loads(self.content), b""


class Failure:
    """An exception on its way from a worker: itself where it can be pickled, and its traceback as text."""

    def __init__(self, error: Exception, where: str) -> None:
        self.where = where
        self.note = f"in {where}:\n{traceback.format_exc()}"
        self.text = f"{type(error).__name__}: {text_of(error)}"
        try:
            self.content = cloudpickle.dumps(error)
            pickle.loads(self.content)
        except Exception:
            self.content = b""

    def error(self) -> Exception:
        """Return the exception, with the traceback as a note."""
        found: Exception = pickle.loads(self.content) if self.content else RuntimeError(self.text)
        found.add_note(self.note)
        return found
