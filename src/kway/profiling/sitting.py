"""A rank of several, or one device alone, on a copy of the model: steps over real batches, timed in windows."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count, pairwise
from typing import Any

import torch
from torch import nn

from kway.comm.buckets import WATCHED_STEPS
from kway.comm.rehearsed import Calls, RehearsedGroup
from kway.data.loader import Loader, Share
from kway.data.order import KeyedOrder
from kway.data.own_copy import FromTheStart
from kway.data.parts import Parts
from kway.data.streams import StreamOrder
from kway.errors import DataError
from kway.job import Job
from kway.launch.status import Status
from kway.profiling.phases import Marks, Phases, PhaseTimer
from kway.profiling.seats import Seat
from kway.records import Plan
from kway.step.kinds import KINDS
from kway.step.telling import Telling
from kway.strategies.layout import fit, title
from kway.strategies.shared_state import Reach
from kway.training.on_a_copy import open_on_copy
from kway.world import World

# What each rank would tell the others is not compared: the others are not there. What is recorded tells each time.
_TELLS_NEVER, _TELLS_EACH = Telling(every=1 << 62), Telling(compared=False)
# Steps of a window, as many as one of ``kway train``; seconds that it lasts on a GPU, which is waited for at its ends.
WINDOW, LEAST_S = 10, 0.05


@dataclass
class Reading:
    """Seconds a step by window: of whole steps, and of their parts by name. ``single``: of each step of a window."""

    step: list[float] = field(default_factory=list)
    single: list[list[float]] = field(default_factory=list)
    parts: dict[str, list[float]] = field(default_factory=dict)


class Sitting:
    """A rank of ``seat.devices`` data-parallel ranks on ``device``, alone: what it would hear is its own.

    ``step`` numbers the steps that were taken, ``shares`` are those of ``seat`` that it takes, ``lasts`` is how many
    seconds a window takes at least. Raises what the engine raises.
    """

    def __init__(
        self,
        job: Job,
        model: nn.Module,
        plan: Plan,
        seat: Seat,
        device: str,
        opened: ExitStack,
        status: Status,
    ) -> None:
        layout = {} if seat.devices == 1 else fit("data", seat.devices)
        self.seat, self.step, self.calls, self.shares = seat, 0, Calls(), seat.shares
        self.marks = Marks(torch.device(device))
        groups = partial(RehearsedGroup, self.calls)
        world = World(0, seat.devices, device=device, threads=seat.threads, groups=groups)
        own = replace(plan, layout=layout, strategy=title(layout), device_set=[device] * seat.devices)
        telling = _TELLS_EACH if KINDS[plan.step_kind].records else _TELLS_NEVER
        self.engine, self.parts = open_on_copy(job, model, own, world, status, opened, telling=telling)
        self.lasts = LEAST_S if self.engine.device.type == "cuda" else 0.0
        self.batch_size = self.parts.order.batch_size
        self._job, self._users, self._opened = job, model, opened
        self.phases = Phases(self.engine, self.calls)
        self._timer = PhaseTimer(self.marks)
        # Of the steps of warm-up, by their share; and what lay on the GPU before those of the first one.
        self._warm_peak: dict[int, int] = {}
        self._alone: int | None = None
        self._shares: dict[int, Iterator[Share]] = {}
        self._loaders: dict[int, Loader] = {}

    def share(self, samples: int) -> Share:
        """Return the next share of ``samples`` of a real batch, read as ranks read it."""
        if samples not in self._shares:
            self._shares[samples] = self._read(samples)
        return next(self._shares[samples])

    def take(self, samples: int, steps: int = 1, marks: list[Any] | None = None) -> float:
        """Take steps over shares of ``samples``; return the seconds that the host waited for them.

        ``marks`` gets a point in time after each step.
        """
        waited, tally = 0.0, self.engine.tally([*self._job.metrics])
        for _ in range(steps):
            begun = time.perf_counter()
            share = self.share(samples)
            waited += time.perf_counter() - begun
            self.engine.step(share, self.step, tally)
            self.step += 1
            if marks is not None:
                marks.append(self.marks.now())
        return waited

    def window(self, samples: int, steps: int, reading: Reading, parts: bool) -> None:
        """Time ``steps`` steps, and where ``parts`` are to be told apart, as many again with marks between them."""
        torch.set_num_threads(self.seat.threads)
        # What another sitting left in the caches is no part of this one.
        self.take(samples)
        begun = self.marks.wait()
        ends = [self.marks.now()]
        self.take(samples, steps, ends)
        reading.step.append((self.marks.wait() - begun) / steps)
        reading.single.append([self.marks.between(*pair) for pair in pairwise(ends)])
        if not parts:
            return
        self.phases.around = self._timer.around
        try:
            waited = self.take(samples, steps)
            self.marks.wait()
            found = {**self._timer.take(), "input": waited}
        finally:
            self.phases.around = None
        for part, seconds in found.items():
            reading.parts.setdefault(part, []).append(seconds / steps)

    def leave(self, samples: int) -> None:
        """Forget a share: it is not taken again."""
        self.shares = tuple(each for each in self.shares if each != samples)
        self._put_away(samples)

    def _put_away(self, samples: int) -> None:
        """Close what reads shares of so many samples: it begins anew if they are asked for again."""
        self._shares.pop(samples, None)
        loader = self._loaders.pop(samples, None)
        if loader is not None:
            loader.close()

    def peak(self, samples: int) -> int:
        """Return the most bytes that a step over ``samples`` has on this GPU, all that was there before among them.

        Also of the steps before, but for the very first ones: where steps are recorded, that takes more than they do
        later.
        """
        for other in [each for each in self._loaders if each != samples]:
            # Each may hold the data on the GPU, and a run has one.
            self._put_away(other)
        self.take(samples)
        self.marks.wait()
        torch.cuda.reset_peak_memory_stats(self.engine.device)
        self.take(samples)
        self.marks.wait()
        return max(torch.cuda.max_memory_allocated(self.engine.device), self._warm_peak.get(samples, 0))

    def kept_for_gradients(self) -> tuple[int, int] | None:
        """Return the bytes that one of several keeps to add gradients up: see ``GradientReducer.kept_bytes``.

        ``None`` for one device alone, and where the level adds them up otherwise.
        """
        reducer = self.engine.part.reducer
        return None if reducer is None else reducer.kept_bytes

    def warm(self, samples: int, steps: int) -> float:
        """Take steps until what happens once has happened; return the seconds of the last one."""
        torch.set_num_threads(self.seat.threads)
        # What they copy once is told by ``kept_for_gradients``.
        first = min(WATCHED_STEPS, steps - 1)
        self.take(samples, first)
        here, looks = self.engine.device, self.engine.device.type == "cuda"
        if looks:
            self.marks.wait()
            torch.cuda.reset_peak_memory_stats(here)
            lies = torch.cuda.memory_allocated(here)
            alone = self._alone = lies if self._alone is None else self._alone
        self.take(samples, steps - 1 - first)
        begun = self.marks.wait()
        self.take(samples)
        seconds = self.marks.wait() - begun
        if looks:
            # Recordings of other shares, and data that their loaders hold, are not there in a run of this one.
            self._warm_peak[samples] = torch.cuda.max_memory_allocated(here) - lies + alone
        return seconds

    def not_in_threads(self, samples: int) -> str | None:
        """Take one step; return why this copy and its model cannot be replicas in one process, or ``None``."""
        copy, users = Reach(self.engine.model, self.engine.job), Reach(self._users, self._job)
        with copy.watched(users.keys) as changes:
            self.take(samples)
        return copy.leads_to(users.own) or changes.found

    def rehearse(self, samples: int) -> list[Any]:
        """Take one step; return the collectives that it called."""
        self.calls.made.clear()
        self.calls.noting = True
        try:
            self.take(samples)
        finally:
            self.calls.noting = False
        return list(self.calls.made)

    def _read(self, samples: int) -> Iterator[Share]:
        own = samples == self.seat.shares[0]
        whole = self.batch_size if own else samples * self.seat.devices
        parts = ordered(self.parts, whole, self._job)
        loader = self._loaders[samples] = self.engine.loader(parts)
        self._opened.callback(loader.close)
        return _whole(loader.epoch, parts.order.batch_size)


def ordered(parts: Parts, batch_size: int, job: Job) -> Parts:
    """Return ``parts`` with batches of another size, in kway's own order: the user's sampler is not asked.

    No larger than the data set. A stream is read from its start each time, also one that can be read once.
    """
    order = parts.order
    if isinstance(order, StreamOrder):
        stream = FromTheStart(parts.dataset)
        return replace(parts, dataset=stream, order=replace(order, batch_size=batch_size))
    samples = order.samples
    assert samples is not None
    keyed = KeyedOrder(samples, min(batch_size, samples), job.seed, job.shuffle)
    return replace(parts, order=keyed)


def _whole(epoch: Callable[[int], Iterator[Share]], batch_size: int) -> Iterator[Share]:
    """Yield shares of whole batches, epoch after epoch. Raises ``DataError`` for a stream that holds none."""
    for number in count():
        empty = True
        for share in epoch(number):
            if share.total == batch_size:
                empty = False
                yield share
        if empty:
            raise DataError(
                f"a stream that ends before its first batch of {batch_size} samples",
                "steps are timed over whole batches",
                "use a smaller batch",
            )
