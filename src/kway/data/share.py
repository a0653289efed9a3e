"""Cut a global batch into the shares of the ranks, and a share into micro-batches."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kway.data.arrays import InMemory
from kway.data.fetch import Fetcher, Request
from kway.data.order import Indices, bounds, check_batch_size, split
from kway.data.parts import Parts


@dataclass(frozen=True)
class Share:
    """What one rank holds of one global batch.

    ``micro``: the collated micro-batches in order, on the CPU or where the loader
    brought them, each with how many of its samples count;
    one where no ``micro_batch`` was asked for, and equally many on every rank. ``count``: how many samples of
    the rank count; ``total``: how many samples the global batch has. ``indices``: the data set indices of the
    rank's samples, int64 of shape (count,).

    A rank or a micro-batch without a sample holds one real sample with a count of 0. On a rank without any the
    model runs like the others', so that their collectives meet, and its loss weighs nothing; where only the
    micro-batch is empty it is left out.
    """

    micro: list[tuple[Any, int]]
    count: int
    total: int
    epoch: int
    step: int
    indices: Indices


@dataclass(frozen=True)
class Outline:
    """A share before it is read: the request for each micro-batch, with the number of samples that count."""

    requests: list[tuple[Request, int]]
    total: int
    epoch: int
    step: int
    indices: Indices

    def filled(self, batches: list[Any]) -> Share:
        """Return the share, given one batch a request."""
        counts = [count for _, count in self.requests]
        micro = list(zip(batches, counts, strict=True))
        return Share(micro, len(self.indices), self.total, self.epoch, self.step, self.indices)


def outline(
    whole: Indices,
    epoch: int,
    step: int,
    rank: int,
    size: int,
    micro_batch: int | None,
    shards: int | None = None,
) -> Outline:
    """Return what ``rank`` of ``size`` reads of the global batch ``whole`` (int64, shape (samples,)).

    Shares are contiguous and balanced. The largest share says how many micro-batches there are, on all ranks.
    With ``shards``, the batch is cut into that many micro-batches for all ranks together, and a rank's share
    is a run of them: their samples do not depend on the number of ranks.
    """
    total = len(whole)
    if shards is not None:
        return _grid(whole, epoch, step, bounds(shards, size, rank), shards)
    first, last = bounds(total, size, rank)
    local = whole[first:last]
    largest = split(total, size)[0]
    pieces = 1 if micro_batch is None else max(1, -(-largest // check_batch_size(micro_batch)))
    requests = []
    for piece in range(pieces):
        start, stop = bounds(len(local), pieces, piece)
        chosen = local[start:stop]
        ghost = local[:1] if len(local) else whole[:1]
        # The position in the global batch, not the rank, is what seeds collate.
        request = Request(epoch, step, first + start, chosen if len(chosen) else ghost)
        requests.append((request, len(chosen)))
    return Outline(requests, total, epoch, step, local)


def _grid(whole: Indices, epoch: int, step: int, held: tuple[int, int], shards: int) -> Outline:
    requests = []
    edges = [bounds(len(whole), shards, shard) for shard in range(*held)]
    for start, stop in edges:
        chosen = whole[start:stop]
        requests.append((Request(epoch, step, start, chosen if len(chosen) else whole[:1]), len(chosen)))
    return Outline(requests, len(whole), epoch, step, whole[edges[0][0] : edges[-1][1]])


def reader(parts: Parts, seed: int) -> Callable[[Request], Any]:
    """Return the function that reads one request in this process."""
    data = parts.dataset
    if isinstance(data, InMemory) and parts.collate is None:
        return lambda request: data.take(request.indices)
    return Fetcher(data, parts.collate, seed).fetch


def cut(
    parts: Parts,
    indices: Indices,
    *,
    epoch: int,
    step: int,
    rank: int,
    size: int,
    seed: int,
    micro_batch: int | None = None,
    shards: int | None = None,
) -> Share:
    """Read, in this process, the share of ``rank`` in the global batch of the data set ``indices``."""
    found = outline(indices, epoch, step, rank, size, micro_batch, shards)
    read = reader(parts, seed)
    return found.filled([read(request) for request, _ in found.requests])
