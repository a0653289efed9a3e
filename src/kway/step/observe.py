"""What a step does, operation by operation, and what it leaves behind on the host.

A recorded step does the same again with other numbers in its tensors. That is right only where the host has no part
in it: no branch on a value, no counter, no random number of the host, nothing that a module remembers from one step
to the next beside tensors that stay where they are. Two steps of one form are compared for that.
"""

import random
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from kway.step.alike import PLAIN
from kway.step.seeds import Keyed, has_drawn

Tensor = torch.Tensor
_KWAY = Path(__file__).resolve().parents[1]


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


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)


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
