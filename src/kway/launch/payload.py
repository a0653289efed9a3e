"""Objects on their way between processes: functions by value, large memory once, through a mapped file.

A payload is bytes. Buffers of at least 64 KiB (tensor storages, numpy arrays, anything that offers its memory
to pickle protocol 5) go into one file in a folder that the caller owns; each reader maps it copy-on-write, so
ranks share the pages and a write in one of them reaches nobody else. Storages that tensors share stay shared.
Tensors on other devices arrive on the CPU: which device is whose is the receiver's business.
"""

import mmap
import os
import pickle
import sys
import tempfile
from contextlib import suppress
from importlib import import_module
from io import BytesIO
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

from kway import by_value
from kway.launch.parameter_hooks import hang, hooks_on
from kway.launch.temporary import needs_room

_LARGE = 64 * 1024
_ALIGN = 64
_PROTOCOL = 5


class _Storage:
    """Stands for one storage of torch in the pickle, so that tensors which share it keep sharing it."""

    def __init__(self, storage: Any) -> None:
        self.storage = storage

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore_storage, (pickle.PickleBuffer(_memory_of(self.storage)),)


def _memory_of(storage: Any) -> Any:
    """View the bytes of a storage, in CPU memory, as a flat array."""
    import torch

    return torch.empty(0, dtype=torch.uint8).set_(storage.cpu()).numpy()


def _restore_storage(buffer: Any) -> Any:
    import torch

    memory = memoryview(buffer)
    if memory.nbytes == 0:
        return torch.empty(0, dtype=torch.uint8).untyped_storage()
    # Small buffers come as immutable bytes inside the pickle; large ones as a private, writable mapping.
    return torch.frombuffer(
        bytearray(memory) if memory.readonly else memory, dtype=torch.uint8
    ).untyped_storage()


def _restore_typed(storage: Any, dtype: Any) -> Any:
    typed: Any = import_module("torch.storage").TypedStorage
    return typed(wrap_storage=storage, dtype=dtype, _internal=True)


def _restore_untyped(storage: Any) -> Any:
    # For number types without a typed storage of their own, torch pickles the untyped one, but its function
    # that rebuilds the tensor expects a wrapper with this attribute.
    storage._untyped_storage = storage
    return storage


def _restore_parametrized(cls: type, names: list[str]) -> Any:
    """Make an empty module of ``cls`` whose tensors ``names`` are computed by parametrizations."""
    import torch
    from torch.nn.utils import parametrize

    made: Any = object.__new__(cls)
    torch.nn.Module.__init__(made)
    for name in names:
        made.register_buffer(name, torch.zeros(1))
        # The real parametrizations arrive with the state; this one only makes torch build class and property.
        parametrize.register_parametrization(made, name, torch.nn.Identity(), unsafe=True)
    return made


class _Pickler(by_value.Pickler):
    def __init__(self, out: BytesIO, buffers: Any) -> None:
        super().__init__(out, protocol=_PROTOCOL, buffer_callback=buffers)
        self._torch: ModuleType | None = sys.modules.get("torch")
        self._storages: dict[tuple[Any, ...], _Storage] = {}

    def reducer_override(self, obj: Any) -> Any:
        torch = self._torch
        if torch is not None:
            if isinstance(obj, torch.storage.TypedStorage):
                return _restore_typed, (self._shared(obj._untyped_storage), obj.dtype)
            if isinstance(obj, torch.UntypedStorage):
                return _restore_untyped, (self._shared(obj),)
            if isinstance(obj, torch.nn.Module) and _is_parametrized(obj):
                return self._parametrized(obj)
            if isinstance(obj, torch.nn.Parameter) and (hooks := hooks_on(obj)):
                # As a state: they may know the model that holds the parameter, which is made before them.
                make, arguments, *_ = obj.__reduce_ex__(_PROTOCOL)
                return make, arguments, hooks, None, None, hang
        return super().reducer_override(obj)

    def _shared(self, storage: Any) -> _Storage:
        # The address is a key only while the storage lives, so the stand-in holds it.
        key = (str(storage.device), storage.data_ptr(), storage.nbytes())
        return self._storages.setdefault(key, _Storage(storage))

    @staticmethod
    def _parametrized(module: Any) -> tuple[Any, ...]:
        from torch.nn.utils import parametrize

        original = parametrize.type_before_parametrizations(module)
        names = list(module.parametrizations)
        return _restore_parametrized, (original, names), module.__dict__


def _is_parametrized(module: Any) -> bool:
    from torch.nn.utils import parametrize

    return bool(parametrize.is_parametrized(module))


class _File:
    """The buffers of one payload: none, or all of them one after another in one file."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._out: BinaryIO | None = None
        self.path: str | None = None
        self.spans: list[tuple[int, int]] = []

    def take(self, buffer: pickle.PickleBuffer) -> bool:
        """Write a large buffer to the file and return false; leave a small one in the pickle."""
        memory = buffer.raw()
        if self._folder is None or memory.nbytes < _LARGE:
            return True
        with needs_room(self._folder, memory.nbytes):
            if self._out is None:
                handle, self.path = tempfile.mkstemp(dir=self._folder, prefix="payload-")
                self._out = os.fdopen(handle, "wb")
            start = self._out.tell()
            self.spans.append((start, memory.nbytes))
            self._out.write(memory)
            self._out.write(bytes(-memory.nbytes % _ALIGN))
            self._out.flush()  # what the disk refuses is known here, and not when the file is closed
        return False

    def close(self) -> None:
        if self._out is not None:
            self._out.close()

    def discard(self) -> None:
        with suppress(OSError):  # what could not be written is still waiting to be
            self.close()
        if self.path is not None:
            Path(self.path).unlink(missing_ok=True)


class _Nowhere(BytesIO):
    """Takes a pickle, and forgets it."""

    def write(self, data: Any, /) -> int:
        return len(data)


def dump(obj: Any, folder: Path | None = None) -> bytes:
    """Pickle ``obj``; buffers of at least 64 KiB go to a file in ``folder`` (with ``None``: into the bytes).

    Raises ``NoRoomError`` where the folder takes no more, and what the pickling raises (``kway.launch.blame`` turns
    that into an error for the user); then no file is left.
    """
    out, file = BytesIO(), _File(folder)
    try:
        _Pickler(out, file.take).dump(obj)
    except BaseException:
        file.discard()
        raise
    file.close()
    return pickle.dumps((file.path, file.spans, out.getvalue(), _next_hook()), protocol=_PROTOCOL)


def check(obj: Any) -> None:
    """Raise what pickling ``obj`` raises; nothing of it is kept for that."""
    _Pickler(_Nowhere(), lambda buffer: False).dump(obj)


def load(payload: bytes, *, keep: bool = True) -> Any:
    """Rebuild what ``dump`` was given. With ``keep=False`` the file loses its name once it is mapped."""
    path, spans, body, next_hook = pickle.loads(payload)
    if path is None:
        return _numbered(pickle.loads(body), next_hook)
    with Path(path).open("rb") as file:
        memory = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
    if not keep:
        Path(path).unlink()
    buffers = [memory[start : start + size] for start, size in spans]
    return _numbered(pickle.loads(body, buffers=buffers), next_hook)


def _next_hook() -> int:
    """Return the number that torch gives the next hook of this process."""
    hooks: Any = sys.modules.get("torch.utils.hooks")
    return 0 if hooks is None else int(hooks.RemovableHandle.next_id)


def _numbered(obj: Any, next_hook: int) -> Any:
    """Return ``obj``; let no hook to come take the place of one in it, which another process has numbered."""
    # Where torch is not there nothing has come that it numbers.
    hooks: Any = sys.modules.get("torch.utils.hooks")
    if hooks is not None:
        hooks.RemovableHandle.next_id = max(hooks.RemovableHandle.next_id, next_hook)
    return obj
