"""One rank's share of every global batch."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from kway.data.arrays import InMemory
from kway.data.fetch import Fetcher, Request
from kway.data.order import Indices, bounds
from kway.data.parts import Parts
from kway.data.workers import Workers
from kway.errors import UsageError


@dataclass(frozen=True)
class Share:
    """What one rank holds of one global batch.

    ``batch`` is the collated local samples, on the CPU; ``count`` how many of them count; ``total`` how many
    samples the global batch has; ``indices`` the data set indices of the local samples, int64 of shape
    (count,). A rank whose share is empty has ``count`` 0 and, as ``batch``, one real sample (the first of the
    global batch): its model runs like the others', and its loss weighs nothing.
    """

    batch: Any
    count: int
    total: int
    epoch: int
    step: int
    indices: Indices


class Loader:
    """Reads the share of ``rank`` among ``size`` ranks: contiguous parts of each batch, of balanced sizes.

    What a sample holds depends on (seed, epoch, index) only, not on ranks or on ``parts.workers``. One epoch
    is read at a time. ``close`` ends the worker processes.
    """

    def __init__(self, parts: Parts, *, rank: int, size: int, seed: int) -> None:
        if not 0 <= rank < size:
            raise UsageError(f"rank {rank} of {size}", f"a rank from 0 to {size - 1}")
        self.parts, self.rank, self.size, self.seed = parts, rank, size, seed
        self._workers: Workers | None = None
        self._turn = 0

    def steps(self, epoch: int) -> int:
        """Return the number of global batches in an epoch: the same on every rank."""
        return self.parts.order.steps(epoch)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Share]:
        """Yield the rank's share of each global batch of an epoch, from step ``start`` on.

        An exception of the data set comes out as it was raised, from a worker with its traceback as a note.
        """
        self._turn += 1
        plan = self._plan(epoch, start)
        shares = self._read(plan) if self.parts.workers == 0 else self._read_with_workers(plan)
        return self._current(shares, self._turn)

    def close(self) -> None:
        """End the worker processes, if there are any. The loader can be used again: they start anew."""
        self._turn += 1
        if self._workers is not None:
            self._workers.close()
            self._workers = None

    def _current(self, shares: Iterator[Share], turn: int) -> Iterator[Share]:
        for share in shares:
            yield share
            if turn != self._turn:
                raise UsageError("a batch of an epoch that was left", "one epoch of a loader at a time")

    def _plan(self, epoch: int, start: int) -> Iterator[tuple[Share, Request]]:
        """Yield each share, still without its batch, and the request that reads it."""
        nothing = np.empty(0, dtype=np.int64)
        for step in range(start, self.steps(epoch)):
            whole = self.parts.order.batch(epoch, step)
            first, last = bounds(len(whole), self.size, self.rank)
            local = whole[first:last]
            share = Share(None, len(local), len(whole), epoch, step, local if len(local) else nothing)
            # The first position in the batch, not the rank, seeds collate.
            yield share, Request(epoch, step, first, local if len(local) else whole[:1])

    def _read(self, plan: Iterator[tuple[Share, Request]]) -> Iterator[Share]:
        data = self.parts.dataset
        if isinstance(data, InMemory) and self.parts.collate is None:
            for share, request in plan:
                yield _filled(share, data.take(request.indices))
            return
        fetcher = Fetcher(data, self.parts.collate, self.seed)
        for share, request in plan:
            yield _filled(share, fetcher.fetch(request))

    def _read_with_workers(self, plan: Iterator[tuple[Share, Request]]) -> Iterator[Share]:
        if self._workers is None:
            fetcher = Fetcher(self.parts.dataset, self.parts.collate, self.seed)
            self._workers = Workers(fetcher, self.parts.workers, self.parts.worker_init, self.rank)
        waiting: deque[Share] = deque()

        def requests() -> Iterator[Request]:
            for share, request in plan:
                waiting.append(share)
                yield request

        for batch in self._workers.read(requests()):
            yield _filled(waiting.popleft(), batch)


def _filled(share: Share, batch: Any) -> Share:
    return Share(batch, share.count, share.total, share.epoch, share.step, share.indices)
