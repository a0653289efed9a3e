"""One rank's share of every global batch of an epoch."""

from collections import deque
from collections.abc import Iterator
from functools import partial
from itertools import count

from kway.data.agreement import Compare, alone, check_order, check_stream
from kway.data.fetch import Fetcher, Request
from kway.data.order import check_batch_size
from kway.data.parcel import Reader
from kway.data.parts import Parts
from kway.data.share import Outline, Share, cut, outline, reader
from kway.data.stream_reader import StreamAnswer, StreamReader, StreamRequest, empty
from kway.data.streams import StreamOrder
from kway.data.workers import Workers
from kway.errors import UsageError

__all__ = ["Loader", "Share", "cut"]


class Loader:
    """Reads the share of ``rank`` among ``size`` ranks: contiguous parts of each batch, of balanced sizes.

    ``micro_batch``: the most samples in one of the share's micro-batches. ``shards``: a fixed number of
    micro-batches of the global batch instead. What a sample holds depends on
    (seed, epoch, index) only, not on ranks or on ``parts.workers``. One epoch is read at a time. ``close``
    ends the worker processes.

    ``compare`` compares a number over the ranks. It is called once an epoch of a user's sampler and once a batch
    of a stream, to see that all ranks read the same: reading these is a collective.
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
        compare: Compare = alone,
    ) -> None:
        if not 0 <= rank < size:
            raise UsageError(f"rank {rank} of {size}", f"a rank from 0 to {size - 1}")
        self.parts, self.rank, self.size, self.seed = parts, rank, size, seed
        self.micro_batch = None if micro_batch is None else check_batch_size(micro_batch)
        self.shards = shards
        self._compare = compare
        # Not a method: it travels to the worker that reads a stream, and the loader must not.
        self._outline = partial(
            outline, rank=rank, size=size, micro_batch=self.micro_batch, shards=self.shards
        )
        self._workers: Workers | None = None
        self._stream: StreamReader | None = None
        self._turn = 0

    def steps(self, epoch: int) -> int | None:
        """Return the number of global batches in an epoch, the same on every rank; ``None``: not known before."""
        return self.parts.order.steps(epoch)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Share]:
        """Yield the rank's share of each global batch of an epoch, from step ``start`` on.

        An exception of the data set comes out as it was raised, from a worker with its traceback as a note.
        Raises ``DataError`` for a stream without a batch, and for a sampler or stream that ranks see differently.
        """
        self._turn += 1
        order = self.parts.order
        if isinstance(order, StreamOrder):
            return self._guarded(self._streamed(order, epoch, start, self._turn), self._turn)
        return self._guarded(self._indexed(epoch, start), self._turn)

    def close(self) -> None:
        """End the worker processes, if there are any. The loader can be used again: they start anew."""
        self._turn += 1
        self._stream = None
        if self._workers is not None:
            self._workers.close()
            self._workers = None

    def _guarded(self, shares: Iterator[Share], turn: int) -> Iterator[Share]:
        """Pass shares on, until another epoch was begun: worker processes answer for one epoch at a time."""
        for share in shares:
            yield share
            if turn != self._turn:
                raise UsageError("an epoch of a loader that was left", "one epoch at a time")

    def _opened(self, reader: Reader) -> Workers:
        if self._workers is None:
            self._workers = Workers(reader, self.parts.workers, self.parts.worker_init, self.rank)
        return self._workers

    def _indexed(self, epoch: int, start: int) -> Iterator[Share]:
        order = self.parts.order
        digest = order.digest(epoch) if self.size > 1 else None
        if digest is not None:
            check_order(self._compare, digest, type(getattr(order, "sampler", order)).__name__, epoch)
        steps = order.steps(epoch)
        assert steps is not None
        outlines = (self._outline(order.batch(epoch, step), epoch, step) for step in range(start, steps))
        yield from self._read(outlines) if self.parts.workers == 0 else self._read_with_workers(outlines)

    def _read(self, outlines: Iterator[Outline]) -> Iterator[Share]:
        read = reader(self.parts, self.seed)
        for found in outlines:
            yield found.filled([read(request) for request, _ in found.requests])

    def _read_with_workers(self, outlines: Iterator[Outline]) -> Iterator[Share]:
        workers = self._opened(Fetcher(self.parts.dataset, self.parts.collate, self.seed))
        waiting: deque[Outline] = deque()

        def requests() -> Iterator[Request]:
            for found in outlines:
                waiting.append(found)
                yield from (request for request, _ in found.requests)

        batches = []
        for batch in workers.read(requests()):
            batches.append(batch)
            if len(batches) == len(waiting[0].requests):
                yield waiting.popleft().filled(batches)
                batches = []

    def _streamed(self, order: StreamOrder, epoch: int, start: int, turn: int) -> Iterator[Share]:
        name = type(self.parts.dataset).__name__
        for step, answer in enumerate(self._answers(epoch, start, turn), start):
            check_stream(self._compare, answer.digest, name, epoch, step)
            if answer.share is None:
                if step == 0:
                    raise empty(name, epoch, order, answer.left)
                return
            yield answer.share

    def _answers(self, epoch: int, start: int, turn: int) -> Iterator[StreamAnswer]:
        if self._stream is None:
            self._stream = StreamReader(self.parts, self.seed, self._outline, self.size > 1)
        requests = (StreamRequest(turn, epoch, step) for step in count(start))
        if self.parts.workers:
            return self._opened(self._stream).read(requests)
        return map(self._stream.fetch, requests)
