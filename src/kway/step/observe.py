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
from types import FunctionType, TracebackType
from typing import Any, Self

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from kway.step.contents import DEPTH, PLAIN, Contents, Root, alike, same
from kway.step.seeds import Keyed, has_drawn

Tensor = torch.Tensor
_KWAY = Path(__file__).resolve().parents[1]
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


class _Held:
    """Which objects the modules of a model hold as attributes and buffers, and what lies in these and in ``around``.

    ``failed`` says what could not be looked at.
    """

    def __init__(self, model: nn.Module, around: Sequence[Any], depth: int) -> None:
        modules = dict(model.named_modules())
        # Held, so that no other object can take the place of one.
        own = [(path, vars(module), dict(vars(module))) for path, module in modules.items()]
        buffers = [(path, table["_buffers"], dict(table["_buffers"])) for path, table, _ in own]
        self._tables = [*own, *buffers]
        self._known = [(table, [*known.values()]) for _, table, known in self._tables]
        inside = [
            Root(value, _of_the_model, _joined(path, name))
            for path, _, known in own
            for name, value in known.items()
            if name not in _TABLES
        ]
        roots = [Root(value, partial(_kept, _title(value)), "", depth, _is_ours(value)) for value in around]
        # Each to its end: a model that holds much must not hide what a loss counts.
        self._contents = Contents(inside, roots, known=[*modules.values()])
        self.failed = self._contents.failed

    def unchanged(self) -> bool:
        """Whether all are the same objects, or say the same."""
        return all(same(own.values(), known) for own, known in self._known) and self._contents.unchanged()

    def change(self) -> str | None:
        """Say what is another object or number now, or ``None``."""
        for path, now, known in self._tables:
            for name in {**known, **now}:
                if name not in known or name not in now or not alike(now[name], known[name]):
                    return _of_the_model(_joined(path, name))
        return self._contents.change()


class HostState:
    """What the host keeps of a model, and of the functions around it, between two steps.

    ``others``: the loss, metrics and penalty: what they hold and what they close over, a few levels deep.
    """

    def __init__(self, model: nn.Module, others: Sequence[Any] = ()) -> None:
        self._held = _Held(model, others, _DEPTH_AROUND)

    def change(self) -> str | None:
        """Say what has changed since it was made, or what could not be looked at, or ``None``."""
        changed = self._held.change()
        return f"{changed} changes from one step to the next" if changed else self._held.failed


class Attributes:
    """Which objects the modules of a model hold as attributes and buffers, and where parameters and buffers lie: a
    cheap look for every step.

    Whoever changes one between two steps means the next step to follow. ``Module.to`` leaves a parameter the same
    object in other memory, so that one that went away and came back is seen by its address alone.
    ``around``: functions and objects that a step calls beside the model.
    """

    def __init__(self, model: nn.Module, around: Sequence[Any] = ()) -> None:
        self._held = _Held(model, around, DEPTH)
        named = [*model.named_parameters(), *model.named_buffers()]
        placed = [(name, tensor) for name, tensor in named if _has_address(tensor)]
        self._names, self._placed = [name for name, _ in placed], [tensor for _, tensor in placed]
        self._addresses = [*map(Tensor.data_ptr, self._placed)]

    def unchanged(self) -> bool:
        """Whether all of them are the same objects, in the same memory, or the same numbers."""
        return [*map(Tensor.data_ptr, self._placed)] == self._addresses and self._held.unchanged()

    def change(self) -> str | None:
        """Say what of them is another one now, or ``None``."""
        now = map(Tensor.data_ptr, self._placed)
        moved = (n for n, a, b in zip(self._names, now, self._addresses, strict=True) if a != b)
        return self._held.change() or next((f"the memory of {_of_the_model(name)}" for name in moved), None)


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


def _of_the_model(path: str) -> str:
    return f"{path!r} of the model"


def _kept(title: str, path: str) -> str:
    return f"what {title} keeps" + (f" ({path})" if path else "")


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _title(value: Any) -> str:
    # Objects of the user's may have any way of answering.
    name = value.__name__ if isinstance(value, FunctionType) else type(value).__name__
    return str(name)


def _is_ours(value: Any) -> bool:
    return str(type(value).__module__).partition(".")[0] == "kway"


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
    return repr(value) if isinstance(value, (*PLAIN, torch.dtype, torch.device)) else type(value).__name__
