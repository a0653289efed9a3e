"""What a step does, operation by operation, and what it leaves behind on the host.

A recorded step does the same again with other numbers in its tensors. That is right only where the host has no part
in it: no branch on a value, no counter, no random number of the host, nothing that a module remembers from one step
to the next beside tensors that stay where they are. Two steps of one form are compared for that.
"""

import random
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import FunctionType, MethodType, ModuleType, TracebackType
from typing import Any, Self

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from kway.step.contents import Contents, same
from kway.step.seeds import Keyed, has_drawn

Tensor = torch.Tensor
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_KWAY = Path(__file__).resolve().parents[1]
_DEPTH = 3
# Looked at elsewhere; the last is what a compiled step runs.
_TABLES = frozenset({"_parameters", "_buffers", "_modules", "_compiled_call_impl"})
# A loss module lies in what follows it, in what a rule closes over.
_DEPTH_AROUND = 8


class OperationLog(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lists the operations of what runs inside, backward included: names, shapes, dtypes and numbers.

    ``held``: the tensors that were read but not made inside. A recording reads them where they lie, so that they
    have to stay.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[str] = []
        self.held: dict[int, Tensor] = {}
        self._made: set[int] = set()
        self._not_made: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note one operation and run it."""
        kwargs = kwargs or {}
        if func.namespace == "profiler":
            return func(*args, **kwargs)
        self.operations.append(f"{func}({', '.join(_text(a) for a in (*args, *kwargs.values()))})")
        for tensor in _tensors((*args, *kwargs.values())):
            if _storage(tensor) not in self._made:
                self.held.setdefault(id(tensor), tensor)
                self._not_made.add(_storage(tensor))
        result = func(*args, **kwargs)
        # What works in place returns what it was given.
        self._made.update(_storage(t) for t in _tensors((result,)) if _storage(t) not in self._not_made)
        return result

    def difference(self, later: "OperationLog") -> str | None:
        """Return where another step of the same form did something else, or ``None``."""
        pairs = zip(self.operations, later.operations, strict=False)
        number = next((n for n, (a, b) in enumerate(pairs) if a != b), None)
        if number is not None:
            return f"operation {number} was {self.operations[number]} and then {later.operations[number]}"
        if len(self.operations) != len(later.operations):
            return f"it has {len(self.operations)} operations and then {len(later.operations)}"
        return None


class HostState:
    """What the host keeps of a model, and of the functions around it, between two steps.

    ``others``: the loss, metrics and penalty: what they hold and what they close over, a few levels deep.
    """

    def __init__(self, model: nn.Module, others: Sequence[Any] = ()) -> None:
        self._model, self._others = model, others
        self._before = self._now()

    def change(self) -> str | None:
        """Say what has changed since it was made, or ``None``."""
        now = self._now()
        for name in {**self._before, **now}:
            if not _same(self._before.get(name), now.get(name)):
                return f"{name} changes from one step to the next"
        return None

    def _now(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for path, module in self._model.named_modules():
            found |= {f"{name!r} of the model": value for name, value in _of_module(path, module)}
        for other in self._others:
            title = getattr(other, "__name__", type(other).__name__)
            found[f"what {title} keeps"] = _kept(other, _DEPTH_AROUND, closures=True)
        return found


class Attributes:
    """Which objects the modules of a model hold as attributes and buffers, and where parameters and buffers lie: a
    cheap look for every step.

    Whoever changes one between two steps means the next step to follow. ``Module.to`` leaves a parameter the same
    object in other memory, so that one that went away and came back is seen by its address alone.
    ``around``: functions and objects that a step calls beside the model.
    """

    def __init__(self, model: nn.Module, around: Sequence[Any] = ()) -> None:
        modules = [*model.modules()]
        held = [vars(module) for module in modules]
        inside = [value for own in held for name, value in own.items() if name not in _TABLES]
        self._contents = Contents([*inside, *around], modules)
        # Held, so that no other object can take the place of one.
        self._known = [(own, [*own.values()]) for own in [*held, *(module["_buffers"] for module in held)]]
        named = [*model.named_parameters(), *model.named_buffers()]
        self._placed = [tensor for _, tensor in named if _has_address(tensor)]
        self._addresses = [*map(Tensor.data_ptr, self._placed)]

    def unchanged(self) -> bool:
        """Whether all of them are the same objects, in the same memory, or the same numbers."""
        return (
            all(same(own.values(), known) for own, known in self._known)
            and [*map(Tensor.data_ptr, self._placed)] == self._addresses
            and self._contents.unchanged()
        )


class Watched(Keyed):
    """Draws as ever, and takes note of who did."""

    def __init__(self, keys: Sequence[int], device: torch.device) -> None:
        super().__init__(keys, device)
        self._host = self._on_device = False
        self._before: Any = None

    def at(self, place: int) -> None:
        """Draw for ``place`` from now on."""
        self._look()
        super().at(place)
        self._before = _generators()

    def on_host(self) -> str | None:
        """Say that a generator of the host was used, or nothing."""
        self._look()
        return "the step draws random numbers on the host" if self._host else None

    def on_device(self) -> bool:
        """Whether the generator of the device was used."""
        self._look()
        return self._on_device

    def _look(self) -> None:
        if self._before is not None:
            self._host |= _generators() != self._before
            with _disable_current_modes():
                self._on_device |= self._device.type == "cuda" and has_drawn(self._device)


@contextmanager
def waits(found: list[str]) -> Iterator[None]:
    """Add to ``found`` the places in Python code at which the host waited for the device inside."""
    with ExitStack() as opened:
        caught = opened.enter_context(warnings.catch_warnings(record=True))
        warnings.simplefilter("always")
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            before = torch.cuda.get_sync_debug_mode()
            torch.cuda.set_sync_debug_mode("warn")
            opened.callback(torch.cuda.set_sync_debug_mode, before)
        yield
    for warning in caught or []:
        text = str(warning.message)
        if "called a synchronizing" in text:
            file = Path(warning.filename)
            own = "kway's " if file.resolve().is_relative_to(_KWAY) else ""
            found.append(f"{own}{file.name}, line {warning.lineno}")
        elif "debug mode" not in text:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)


class NoLog:
    """Stands for a log where none can be had: compiled code is not made of operations."""

    def __init__(self) -> None:
        self.held: dict[int, Tensor] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def difference(self, later: "NoLog") -> None:
        """Return ``None``: nothing is known of them."""


def _generators() -> tuple[Any, ...]:
    # Not a part of what is listed.
    with _disable_current_modes():
        return _states()


def _states() -> tuple[Any, ...]:
    return (
        torch.default_generator.get_state().numpy().tobytes(),
        repr(np.random.get_state(legacy=False)["state"]),
        random.getstate(),
    )


class _Same:
    """Stands for an object that can only be compared by identity, and holds it: no other gets its address."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def _of_module(path: str, module: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, value in vars(module).items():
        if name in ("_parameters", "_modules", "_compiled_call_impl"):
            continue
        if name == "_buffers":
            yield from ((_joined(path, buffer), _Same(held)) for buffer, held in value.items())
        else:
            yield _joined(path, name), _kept(value, _DEPTH)


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _kept(value: Any, depth: int, closures: bool = False) -> Any:
    """Return what changes with a value: plain ones by themselves, containers and plain objects by what is in them,
    tensors and all others by identity. ``closures``: look also into what functions close over.
    """
    inner = partial(_kept, depth=depth - 1, closures=closures)
    if isinstance(value, _PLAIN):
        return (type(value), repr(value))
    if isinstance(value, torch.Tensor | type | ModuleType) or not depth:
        return _Same(value)
    if isinstance(value, nn.Module):
        own = {k: v for k, v in vars(value).items() if not k.startswith("_")}
        return (_Same(value), inner({**own, **value._buffers}) if depth > 1 else None)
    if isinstance(value, dict):
        return tuple((repr(key), inner(item)) for key, item in value.items())
    if isinstance(value, list | tuple):
        return tuple(map(inner, value))
    if isinstance(value, partial):
        return (inner(value.func), inner(value.args), inner(value.keywords))
    if isinstance(value, MethodType):
        return (_Same(value.__func__), inner(value.__self__))
    if isinstance(value, FunctionType):
        return (_Same(value), *(inner(_content(cell)) for cell in value.__closure__ or () if closures))
    inside = getattr(value, "__dict__", None)
    return (_Same(value), inner(inside)) if isinstance(inside, dict) else _Same(value)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _same(one: Any, other: Any) -> bool:
    return bool(one == other)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)


def _has_address(tensor: Tensor) -> bool:
    try:
        return tensor.data_ptr() != 0
    except (RuntimeError, NotImplementedError):
        # Sparse ones have none, as little as those that stand for several.
        return False


def _storage(tensor: Tensor) -> int:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):
        return id(tensor)


def _text(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, tuple | list):
        return f"[{', '.join(_text(item) for item in value)}]"
    # Of what cannot be written down as a number or a word only the kind is known: a generator, a process group.
    return repr(value) if isinstance(value, (*_PLAIN, torch.dtype, torch.device)) else type(value).__name__
