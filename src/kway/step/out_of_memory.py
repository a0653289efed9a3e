"""An out-of-memory error, caught once and explained: where it happened, what lay there by part, and what helps."""

import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from inspect import isgeneratorfunction
from typing import Any, TypeVar

import torch
from torch import nn

from kway.data.loader import Loader
from kway.data.share import Share
from kway.errors import OutOfMemoryError
from kway.job import Job
from kway.step.core import StepCore
from kway.step.exhausted import asked_for, is_exhaustion, is_of_host, line_of_user, phase_of
from kway.step.fixed import FixedInputs
from kway.step.holdings import Holdings, walk
from kway.step.memory_advice import Situation, advice
from kway.step.recompute import left_alone, recomputes
from kway.step.room import Room, begin_peak
from kway.units import bytes_text, counted

ACTIVATIONS = "activations and workspace"
# Phases that are no part of a step, in words.
_OUTSIDE = {
    "start": "before the first step",
    "input": "while batches were read",
    "reference": "in the reference of a proof",
}
_CPU = torch.device("cpu")
T = TypeVar("T")


class Memory:
    """Knows who holds what of a rank's memory, and explains an exception that says there is no more.

    ``level`` with ``shards`` of a batch; ``trains``: whether steps are taken; ``why_whole``: returns why a share must
    not be cut in time, if so. ``adapts``: whether whoever runs the job can do so with fewer samples at once.
    """

    def __init__(
        self,
        job: Job,
        model: nn.Module,
        device: torch.device,
        rank: int,
        level: str = "math",
        shards: int = 1,
        trains: bool = True,
        why_whole: Callable[[], str | None] = lambda: None,
    ) -> None:
        self.adapts = False
        self._job, self._model, self._device, self._rank = job, model, device, rank
        self._level, self._shards, self._trains, self._why_whole = level, shards, trains, why_whole
        self._optimizer: torch.optim.Optimizer | None = None
        self._core: StepCore | None = None
        self._work: tuple[Any, ...] = ()
        self._loaders: list[weakref.ref[Loader]] = []
        self._reading: Any = None
        self._share: Share | None = None
        if trains:
            begin_peak(device)

    def opened(self, core: StepCore, *work: Any) -> None:
        """Take note of what takes the steps, and of what else holds tensors for it."""
        self._core, self._optimizer, self._work = core, core.optimizer, work

    def held_by(self, optimizer: torch.optim.Optimizer) -> None:
        """Take note of an optimizer that no step of kway's holds."""
        self._optimizer = optimizer

    def fed(self, loader: Loader) -> Loader:
        """Explain what goes wrong while ``loader`` reads; return it."""
        self._loaders.append(weakref.ref(loader))
        loader.around = self.reading
        return loader

    def reading(self, shares: Iterator[Share]) -> Iterator[Share]:
        """Pass shares on, and explain what goes wrong while they are read or brought to the device."""
        try:
            while True:
                # Anew for each: between two steps another loader may have been read.
                self._reading = shares
                with self.explains("input"):
                    share = next(shares, None)
                if share is None:
                    return
                self._share = share
                yield share
                del share  # a batch that nobody else wants
        finally:
            self._reading = self._share = None

    @contextmanager
    def explains(self, doing: str, share: Share | None = None) -> Iterator[None]:
        """Raise ``OutOfMemoryError`` in place of an exception inside that says there is no more memory.

        ``doing``: a phase of that error; of a ``step`` the exception shows which part it was.
        """
        if share is not None:
            self._share = share
        try:
            yield
        except Exception as error:
            if not is_exhaustion(error):
                raise
            told = self._told(error, doing)
            # What failed holds all that it had computed, as long as anybody holds its traceback.
            traceback.clear_frames(error.__traceback__)
            raise told from error

    def _told(self, error: Exception, doing: str) -> OutOfMemoryError:
        device = _CPU if is_of_host(error) else self._device
        phase = phase_of(error) if doing == "step" else doing
        held, room, asked = self._holdings(device), Room.of(device), asked_for(error)
        parts = dict(held.bytes)
        if room.peak is not None:
            parts[ACTIVATIONS] = max(0, room.peak - held.total)
        share = self._share if phase not in _OUTSIDE else None
        samples = max((count for _, count in share.micro), default=0) if share is not None else 0
        now = Situation(
            phase,
            samples,
            share.total if share is not None else 0,
            self._level,
            self._shards,
            self._job.precision,
            self._trains,
            self._why_whole,
            self.adapts,
            len(left_alone(self._model)),
            recomputes(self._model),
            device.type == "cpu",
            held.total,
            None if room.peak is None else parts[ACTIVATIONS] + (asked or 0),
            room.own,
        )
        more = {
            "reserved but unallocated": room.unused,
            "other processes, and outside of torch": room.others,
            "this process, resident": room.resident,
            "this process, resident at most": room.resident_peak,
        }
        numbers = parts | {name: size for name, size in more.items() if size is not None}
        wanted = f"{bytes_text(asked)} were asked for, " if asked is not None else ""
        need = f"{wanted}{_left(room, device)}\n{_table(numbers)}"
        return OutOfMemoryError(
            f"rank {self._rank} ({device}) ran out of memory {self._where(phase, share, error)}",
            need,
            "\n  ".join(["what helps:", *advice(now)]),
            rank=self._rank,
            device=str(device),
            phase=phase,
            samples=samples,
            memory=numbers
            | {"total": room.total, "free": room.free}
            | ({} if asked is None else {"asked": asked}),
            fits=now.fits,
        )

    def _where(self, phase: str, share: Share | None, error: Exception) -> str:
        line = line_of_user(error)
        at = ", ".join([*([] if phase in _OUTSIDE else [phase]), *([line] if line else [])])
        at = f" ({at})" if at else ""
        if phase in _OUTSIDE:
            return f"{_OUTSIDE[phase]}{at}"
        if share is None:
            return f"in a step{at}"
        micro = self._job.micro_batch
        cut = f" (micro_batch={micro})" if micro is not None else ""
        whole = "batch" if phase == "evaluation" else "global batch"
        count = f"{counted(max(n for _, n in share.micro), 'sample')} at once{cut} of a {whole} of {share.total:,}"
        if phase == "evaluation":
            return f"in batch {share.step + 1} of an evaluation{at}, with {count}"
        return f"in epoch {share.epoch + 1}, step {share.step + 1}{at}, with {count}"

    def _holdings(self, device: torch.device) -> Holdings:
        """Count the tensors that are there. The model's own first: others may be views of them."""
        held, core = Holdings(device), self._core
        parameters = [*self._model.parameters()]
        held.add("weights", parameters)
        held.add("gradients", [parameter.grad for parameter in parameters])
        held.add("optimizer state", {} if self._optimizer is None else self._optimizer.state)
        if core is not None and core.average is not None:
            held.add("moving average", core.average)
        held.add("buffers", [*self._model.buffers()], None if core is None else core.kept)
        recorded = [value for value in walk(self._work) if isinstance(value, FixedInputs)]
        loaders = [loader() for loader in self._loaders]
        held.add("input", self._share, self._reading, recorded, loaders, _held_by_data(loaders))
        # What gradients are sent in.
        sent = [] if core is None else [v for v in vars(core).values() if _is_of_comm(v)]
        held.add("gradients", sent, *self._work[:1])
        return held


def _is_of_comm(value: Any) -> bool:
    return type(value).__module__.startswith("kway.comm.")


def _held_by_data(loaders: list[Loader | None]) -> list[Any]:
    """Return what data sets of the user's hold."""
    return [
        value
        for loader in loaders
        if loader is not None
        for value in getattr(loader.parts.dataset, "__dict__", {}).values()
    ]


def _left(room: Room, device: torch.device) -> str:
    where = "this machine, or its control group," if device.type == "cpu" else str(device)
    most = f", of which this process may take {bytes_text(room.most)}" if room.most < room.total else ""
    return f"{bytes_text(room.free)} of the {bytes_text(room.total)} of {where} are free{most}"


def _table(numbers: dict[str, int]) -> str:
    width = max(map(len, numbers))
    return "\n".join(f"  {name:{width}}  {bytes_text(size):>10}" for name, size in numbers.items())


def explained(doing: str) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Decorate a method of something with a ``memory``: see ``Memory.explains``."""

    def around(method: Callable[..., T]) -> Callable[..., T]:
        if isgeneratorfunction(method):

            @wraps(method)
            def generator(self: Any, *args: Any, **kwargs: Any) -> Any:
                with self.memory.explains(doing):
                    yield from method(self, *args, **kwargs)

            return generator

        @wraps(method)
        def plain(self: Any, *args: Any, **kwargs: Any) -> T:
            with self.memory.explains(doing):
                return method(self, *args, **kwargs)

        return plain

    return around
