"""What several replicas in one process share and a step changes: each would read there what another one wrote."""

import operator
import random
import zlib
from array import array
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count, cycle
from types import BuiltinFunctionType, CellType, FunctionType, GeneratorType, MethodType
from typing import Any
from weakref import ref

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from kway.job import Job
from kway.step.process_wide import drawn_from
from kway.strategies.variables import PLAIN, Thing, things_in

Keys = set[tuple[int, str | None]]
# What cannot change.
_STILL = (tuple, frozenset, FunctionType, MethodType, BuiltinFunctionType, type, property)
# What a step may have cleared again by its end, looked at after each operation: the nearest of so many.
_CLEARED, _NEAREST = (dict, list, set, deque, CellType), 500


class Reach:
    """What a replica of ``model`` reaches.

    ``keys`` of all of it; ``own``: those of its layers, which are no other replica's.
    """

    def __init__(self, model: nn.Module, job: Job) -> None:
        names = ("inputs", "target", "penalty", "loss", "metrics", "optimizer", "schedule")
        beside = {name: getattr(job, name) for name in names}
        of_all = {f"the hooks of all modules ({kind})": hooks for kind, hooks in _hooks_of_all().items()}
        self._things = things_in({"the model": model, **beside, **of_all})
        # Whether a step draws from what a process has once is watched otherwise.
        for one in drawn_from():
            self._things.pop((id(one), None), None)
        self.keys: Keys = set(self._things)
        self.own: Keys = {(id(module), None) for module in model.modules()}

    def leads_to(self, own: Keys) -> str | None:
        """Say by what this replica reaches layers of another one, if it does."""
        labels = (thing.label for key, thing in self._things.items() if key in own)
        return next((f"{label} leads to a layer of another replica" for label in labels), None)

    @contextmanager
    def watched(self, keys: Keys) -> Iterator["Changes"]:
        """Watch what is done inside: whether something of ``keys``, which others reach, too, changes."""
        changes = Changes([thing for key, thing in self._things.items() if key in keys])
        with changes:
            yield changes
        changes.look()


class Changes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Watches ``things`` that replicas share. ``found``: that one has changed, if one has."""

    def __init__(self, things: list[Thing]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: str | None = None
        self._noted = [(thing, _Note(thing)) for thing in things if thing.name or not _is_still(thing.of)]
        cleared = [pair for pair in self._noted if _may_be_cleared(pair[0])]
        self._cleared = cleared[:_NEAREST]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and see what was changed before it."""
        self._see(self._cleared)
        return func(*args, **(kwargs or {}))

    def look(self) -> None:
        """See whether anything has changed."""
        self._see(self._noted)

    def _see(self, noted: list[tuple[Thing, "_Note"]]) -> None:
        if self.found is None:
            labels = (thing.label for thing, note in noted if note.differs(thing))
            shared = "which all replicas of this process share"
            self.found = next((f"a step changes {label}, {shared}" for label in labels), None)


def _hooks_of_all() -> dict[str, Any]:
    """Return what torch runs around each layer of the process (``register_module_forward_hook`` and its like)."""
    held = vars(torch.nn.modules.module)
    tables = {
        name: table for name, table in held.items() if name.startswith("_global_") and name.endswith("_hooks")
    }
    return {name.removeprefix("_global_").removesuffix("_hooks"): table for name, table in tables.items()}


def _is_still(value: Any) -> bool:
    return issubclass(type(value), _STILL)


def _may_be_cleared(thing: Thing) -> bool:
    if thing.name:
        return not any(map(_is_still, thing.content()))
    return type(thing.of) in _CLEARED


class _Note:
    """What a thing referred to, which it does not keep alive where it need not, and its own number."""

    def __init__(self, thing: Thing) -> None:
        self._held = [_weak(value) for value in thing.content()]
        self._number = None if thing.name else _number(thing.of)

    def differs(self, thing: Thing) -> bool:
        now = thing.content()
        if len(now) != len(self._held):
            return True
        return not all(map(_is_one, self._held, now)) or (
            self._number is not None and self._number != _number(thing.of)
        )


def _weak(value: Any) -> Any:
    if issubclass(type(value), PLAIN):
        return value
    try:
        return ref(value)
    except TypeError:
        return value


def _is_one(held: Any, now: Any) -> bool:
    if type(held) is ref and type(now) is not ref:
        return held() is now
    return held is now or (type(held) is type(now) and issubclass(type(now), PLAIN) and bool(held == now))


def _number(value: Any) -> Any:
    """Return what tells apart two moments of an object whose references do not."""
    kind = type(value)
    if issubclass(kind, torch.Tensor):
        place = value.data_ptr() if value.layout is torch.strided else 0
        return place, 0 if value.is_inference() else value._version, _sum_of(value)
    if issubclass(kind, torch.Generator):
        return bytes(value.get_state().tolist())
    if issubclass(kind, np.ndarray):
        return zlib.crc32(value.tobytes()) if value.dtype != object else None
    if issubclass(kind, random.Random):
        return value.getstate()
    if issubclass(kind, np.random.RandomState):
        return repr(value.get_state())
    if issubclass(kind, np.random.Generator | np.random.BitGenerator):
        return repr(getattr(value, "bit_generator", value).state)
    if issubclass(kind, bytearray | array):
        return bytes(value)
    if issubclass(kind, GeneratorType):
        return None if value.gi_frame is None else value.gi_frame.f_lasti
    if kind is count:
        return repr(value)
    if kind is cycle:
        # Nothing tells where it stands, and it is there to go on.
        return object()
    return operator.length_hint(value, -1) if hasattr(kind, "__length_hint__") else None


def _sum_of(value: torch.Tensor) -> int:
    """Return a checksum of a tensor's numbers: ``.data`` and ``.numpy()`` write them and leave its version."""
    plain = type(value) in (torch.Tensor, nn.Parameter) and not value.is_quantized
    if not plain or value.layout is not torch.strided or value.device.type == "meta":
        return 0
    flat = value.detach().resolve_conj().resolve_neg().reshape(-1).contiguous()
    return zlib.crc32(flat.view(torch.uint8).cpu().numpy().data)
