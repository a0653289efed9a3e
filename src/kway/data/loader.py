"""One rank's share of every global batch of an epoch."""

from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from typing import TypeVar

import torch

from kway.data.agreement import Compare, alone, check_order, check_stream
from kway.data.ahead import Lane, ahead
from kway.data.fetch import Fetcher, Request
from kway.data.order import KeyedOrder, check_batch_size
from kway.data.padding import Shapes
from kway.data.parcel import Reader
from kway.data.parts import Parts
from kway.data.placed import Placed, place
from kway.data.share import Outline, Share, cut, outline, reader
from kway.data.side_stream import CudaSide
from kway.data.stream_reader import StreamAnswer, StreamReader, StreamRequest, empty
from kway.data.streams import StreamOrder
from kway.data.workers import Workers
from kway.errors import UsageError
from kway.units import bytes_text

T = TypeVar("T")
CPU = torch.device("cpu")

__all__ = ["Loader", "Share", "cut"]


class Loader:
    """Reads the share of ``rank`` among ``size`` ranks: contiguous parts of each batch, of balanced sizes.

    ``micro_batch``: the most samples in one of the share's micro-batches. ``shards``: a fixed number of
    micro-batches of the global batch instead. What a sample holds depends on
    (seed, epoch, index) only, not on ranks or on ``parts.workers``. One epoch is read at a time. ``close``
    ends the worker processes.

    ``device``: where the batches are wanted. On a GPU, data in memory stays there where it fits; other batches are
    copied there ahead of their step. ``placement`` says which, from the first epoch on. The bits are the same.
    ``around``: what shares pass through while they are read. ``workers_named``: ``named`` of ``Workers``.

    ``compare`` compares a number over the ranks. It is called once an epoch of a user's sampler and once a batch
    of a stream, to see that all ranks read the same: reading these is a collective. ``shapes``: in what shapes the
    rank's parts of batches came.
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
        device: torch.device = CPU,
        workers_named: bool = True,
    ) -> None:
        if not 0 <= rank < size:
            raise UsageError(f"rank {rank} of {size}", f"a rank from 0 to {size - 1}")
        self.parts, self.rank, self.size, self.seed = parts, rank, size, seed
        self.micro_batch = None if micro_batch is None else check_batch_size(micro_batch)
        self.shards, self.device = shards, device
        self.placement, self._workers_named = "read by the host", workers_named
        self.shapes = Shapes(parts, shards)
        self._compare = compare
        # Not a method: it travels to the worker that reads a stream, and the loader must not.
        self._outline = partial(
            outline, rank=rank, size=size, micro_batch=self.micro_batch, shards=self.shards
        )
        # One for all epochs: it learns how to ask the data set.
        self._request = reader(parts, seed)
        self._workers: Workers | None = None
        self._stream: StreamReader | None = None
        self._turn = 0
        self._placed: Placed | None = None
        self._lane: Lane | None = None
        self.around: Callable[[Iterator[Share]], Iterator[Share]] = iter

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
        self._choose()
        if self._placed is not None:
            return self._guarded(self._placed.epoch(epoch, start), self._turn)
        if isinstance(order, StreamOrder):
            return self._guarded(self._streamed(order, epoch, start, self._turn), self._turn)
        return self._guarded(self._indexed(epoch, start), self._turn)

    def close(self) -> None:
        """End the worker processes, if there are any, and free the device. The loader can be used again: all of it
        begins anew.
        """
        self._turn += 1
        self._stream = self._placed = self._lane = None
        if self._workers is not None:
            self._workers.close()
            self._workers = None

    def _choose(self) -> None:
        """Decide how batches reach the device, once: free memory changes as soon as training begins."""
        if self.device.type != "cuda" or self._placed is not None or self._lane is not None:
            return
        free, _ = torch.cuda.mem_get_info(self.device)
        self._placed = place(self.parts, self.device, self._outline, free)
        if self._placed is not None:
            self.placement = f"the data ({bytes_text(self._placed.bytes)}) stays on {self.device}"
        else:
            self._lane = Lane(CudaSide(self.device))
            self.placement = f"batches are copied to {self.device} ahead of their step"

    def _ahead(self, items: Iterator[T]) -> Iterator[T]:
        return items if self._lane is None else ahead(items, self._lane)

    def _guarded(self, shares: Iterator[Share], turn: int) -> Iterator[Share]:
        """Pass shares on, until another epoch was begun: worker processes answer for one epoch at a time."""
        for share in self.around(shares):
            self.shapes.take(share)
            yield share
            if turn != self._turn:
                raise UsageError("an epoch of a loader that was left", "one epoch at a time")

    def _opened(self, reader: Reader) -> Workers:
        if self._workers is None:
            count, init = self.parts.workers, self.parts.worker_init
            self._workers = Workers(reader, count, init, self.rank, self._workers_named)
        return self._workers

    def _indexed(self, epoch: int, start: int) -> Iterator[Share]:
        order = self.parts.order
        digest = order.digest(epoch) if self.size > 1 else None
        if digest is not None:
            check_order(self._compare, digest, type(getattr(order, "sampler", order)).__name__, epoch)
        steps = order.steps(epoch)
        assert steps is not None
        batches = (
            order.batches(epoch, start)
            if isinstance(order, KeyedOrder)
            else (order.batch(epoch, step) for step in range(start, steps))
        )
        outlines = (self._outline(batch, epoch, step) for step, batch in enumerate(batches, start))
        read = self._read if self.parts.workers == 0 else self._read_with_workers
        yield from self._ahead(read(outlines))

    def _read(self, outlines: Iterator[Outline]) -> Iterator[Share]:
        for found in outlines:
            yield found.filled([self._request(request) for request, _ in found.requests])

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
        # What ranks compare, they compare when its step comes, however far ahead each has read.
        for step, answer in enumerate(self._ahead(_to_the_end(self._answers(epoch, start, turn))), start):
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


def _to_the_end(answers: Iterator[StreamAnswer]) -> Iterator[StreamAnswer]:
    """Pass answers on, up to the first that says that the stream has ended."""
    for answer in answers:
        yield answer
        if answer.share is None:
            return
