"""What the time of an eager step goes into: forward, backward, optimizer; told apart by the calls that a step makes."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from kway.comm.rehearsed import Calls
from kway.step.core import StepCore
from kway.strategies.engine import Engine

# The methods of a step by the part that they belong to.
METHODS = (
    ("forward", "forward"),
    ("backward", "backward"),
    ("begin_update", "optimizer"),
    ("update", "optimizer"),
)
Around = Callable[[str, StepCore, tuple[Any, ...]], AbstractContextManager[Any]]


class Marks:
    """Points in time on a device: of the host's clock, or events of a GPU's stream, which does not wait for them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now(self) -> Any:
        """Return a mark."""
        if self._device.type != "cuda":
            return time.perf_counter()
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def wait(self) -> float:
        """Wait for the device; return the time in seconds."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def between(self, begin: Any, end: Any) -> float:
        """Return the seconds between two marks, of a device that has been waited for."""
        if self._device.type != "cuda":
            return float(end - begin)
        return float(begin.elapsed_time(end)) * 1e-3


class Phases:
    """Lets ``around`` be open around each part of the steps of ``engine``, while one is set."""

    def __init__(self, engine: Engine, calls: Calls) -> None:
        self._calls = calls
        self.around: Around | None = None
        self._before = engine.part.taking
        engine.part.taking = self._taking

    @contextmanager
    def _taking(self, core: StepCore) -> Iterator[None]:
        with self._before(core), ExitStack() as undo:
            if self.around is not None or self._calls.noting:
                for name, part in METHODS:
                    vars(core)[name] = partial(self._run, getattr(core, name), part, core)
                    undo.callback(vars(core).pop, name)
            yield

    def _run(self, method: Callable[..., Any], part: str, core: StepCore, *args: Any, **kwargs: Any) -> Any:
        self._calls.when = part if part in ("forward", "backward") else "step"
        try:
            if self.around is None:
                return method(*args, **kwargs)
            with self.around(part, core, args):
                return method(*args, **kwargs)
        finally:
            self._calls.when = "step"


class PhaseTimer:
    """Adds up the seconds of each part."""

    def __init__(self, marks: Marks) -> None:
        self._marks = marks
        self._spans: list[tuple[str, Any, Any]] = []

    @contextmanager
    def around(self, part: str, core: StepCore, args: tuple[Any, ...]) -> Iterator[None]:
        """Time what runs while open: see ``Phases``."""
        begun = self._marks.now()
        yield
        self._spans.append((part, begun, self._marks.now()))

    def take(self) -> dict[str, float]:
        """Return the seconds by part since the last time, of a device that has been waited for."""
        found: dict[str, float] = {}
        for part, begin, end in self._spans:
            found[part] = found.get(part, 0.0) + self._marks.between(begin, end)
        self._spans.clear()
        return found
