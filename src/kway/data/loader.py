"""One rank's share of every global batch of an epoch."""

from collections import deque
from collections.abc import Iterator

from kway.data.fetch import Fetcher, Request
from kway.data.order import check_batch_size
from kway.data.parts import Parts
from kway.data.share import Outline, Share, cut, outline, reader
from kway.data.workers import Workers
from kway.errors import UsageError

__all__ = ["Loader", "Share", "cut"]


class Loader:
    """Reads the share of ``rank`` among ``size`` ranks: contiguous parts of each batch, of balanced sizes.

    ``micro_batch``: the most samples in one of the share's micro-batches. ``shards``: a fixed number of
    micro-batches of the global batch instead. What a sample holds depends on
    (seed, epoch, index) only, not on ranks or on ``parts.workers``. One epoch is read at a time. ``close``
    ends the worker processes.
    """

    def __init__(
        self,
        parts: Parts,
        *,
        rank: int,
        size: int,
        seed: int,
        micro_batch: int | None = None,
        shards: int | None = None,
    ) -> None:
        if not 0 <= rank < size:
            raise UsageError(f"rank {rank} of {size}", f"a rank from 0 to {size - 1}")
        self.parts, self.rank, self.size, self.seed = parts, rank, size, seed
        self.micro_batch = None if micro_batch is None else check_batch_size(micro_batch)
        self.shards = shards
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
        read = self._read if self.parts.workers == 0 else self._read_with_workers
        return self._guarded(read(self._outlines(epoch, start)), self._turn)

    def close(self) -> None:
        """End the worker processes, if there are any. The loader can be used again: they start anew."""
        self._turn += 1
        if self._workers is not None:
            self._workers.close()
            self._workers = None

    def _guarded(self, shares: Iterator[Share], turn: int) -> Iterator[Share]:
        """Pass shares on, until another epoch was begun: worker processes answer for one epoch at a time."""
        for share in shares:
            yield share
            if turn != self._turn:
                raise UsageError("an epoch of a loader that was left", "one epoch at a time")

    def _outlines(self, epoch: int, start: int) -> Iterator[Outline]:
        for step in range(start, self.steps(epoch)):
            whole = self.parts.order.batch(epoch, step)
            yield outline(whole, epoch, step, self.rank, self.size, self.micro_batch, self.shards)

    def _read(self, outlines: Iterator[Outline]) -> Iterator[Share]:
        read = reader(self.parts, self.seed)
        for found in outlines:
            yield found.filled([read(request) for request, _ in found.requests])

    def _read_with_workers(self, outlines: Iterator[Outline]) -> Iterator[Share]:
        if self._workers is None:
            fetcher = Fetcher(self.parts.dataset, self.parts.collate, self.seed)
            self._workers = Workers(fetcher, self.parts.workers, self.parts.worker_init, self.rank)
        waiting: deque[Outline] = deque()

        def requests() -> Iterator[Request]:
            for found in outlines:
                waiting.append(found)
                yield from (request for request, _ in found.requests)

        batches = []
        for batch in self._workers.read(requests()):
            batches.append(batch)
            if len(batches) == len(waiting[0].requests):
                yield waiting.popleft().filled(batches)
                batches = []
