"""Read a stream batch by batch: the same in the rank's process and in its worker."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from kway.data.digest import digest_of
from kway.data.fetch import Request, collated
from kway.data.generators import OwnGenerators, preserved
from kway.data.order import Indices, KeyedOrder, key
from kway.data.parts import RESIZED, Parts
from kway.data.share import Outline, Share
from kway.data.streams import StreamOrder
from kway.errors import DataError

_END, _ALONE = 0, 1  # digests: of the end of a stream, and where there is nobody to compare with


class StreamRequest(NamedTuple):
    """Ask for batch ``step`` of ``epoch``. Another ``turn`` than before: from the start of the stream again."""

    turn: int
    epoch: int
    step: int


@dataclass(frozen=True)
class StreamAnswer:
    """This rank's share of a batch, or ``None`` where the stream has ended, and ``left`` items of it with it.

    ``digest`` stands for all items of the global batch; it is taken where there are other ranks.
    """

    share: Share | None
    digest: int
    left: int = 0


class _Course:
    """A stream once from the start. What it draws comes from generators seeded by (seed, epoch)."""

    def __init__(self, dataset: Any, seed: int, epoch: int) -> None:
        self._drawn = OwnGenerators(key(seed, "stream", epoch))
        with self._drawn.in_place():
            if hasattr(dataset, "set_epoch"):
                dataset.set_epoch(epoch)
            self._items = iter(dataset)

    def take(self, count: int) -> list[Any]:
        """Return the next ``count`` items, or the fewer that are left."""
        with self._drawn.in_place():
            return list(islice(self._items, count))

    def skip(self, count: int) -> None:
        """Read ``count`` items and keep none."""
        with self._drawn.in_place():
            for _ in islice(self._items, count):
                continue


class StreamReader:
    """Reads batches of a stream, in order, and keeps this rank's share of each.

    ``outline(positions, epoch, step)`` says which positions the rank keeps. ``with_digest``: whether there are
    other ranks to compare with.
    """

    def __init__(
        self, parts: Parts, seed: int, outline: Callable[[Indices, int, int], Outline], with_digest: bool
    ) -> None:
        order = parts.order
        assert isinstance(order, StreamOrder)
        assert parts.collate is not None
        self.dataset, self.collate, self.order, self.seed = parts.dataset, parts.collate, order, seed
        self._outline, self._with_digest = outline, with_digest
        self._turn = 0
        self._course: _Course | None = None

    def fetch(self, request: StreamRequest) -> StreamAnswer:
        """Return the answer to a request. Those of one turn must come in the order of their steps."""
        size = self.order.batch_size
        if request.turn != self._turn:
            self._turn, self._course = request.turn, _Course(self.dataset, self.seed, request.epoch)
            self._course.skip(request.step * size)
        items = [] if self._course is None else self._course.take(size)
        if not items or (self.order.drop_last and len(items) < size):
            self.close()
            return StreamAnswer(None, _END, len(items))
        start = request.step * size
        positions = np.arange(start, start + len(items), dtype=np.int64)
        found = self._outline(positions, request.epoch, request.step)
        batches = [self._batch(items, start, wanted) for wanted, _ in found.requests]
        return StreamAnswer(found.filled(batches), digest_of(items) if self._with_digest else _ALONE)

    def close(self) -> None:
        """Let go of the stream. The next turn opens it again."""
        self._course = None

    def _batch(self, items: list[Any], start: int, wanted: Request) -> Any:
        with preserved():
            chosen = [items[position - start] for position in wanted.indices.tolist()]
            return collated(self.collate, chosen, self.seed, wanted)


def empty(name: str, epoch: int, order: StreamOrder, left: int) -> DataError:
    """Make the error for a stream that ended before its first batch in ``epoch`` (from 0)."""
    if left:
        return DataError(
            f"in epoch {epoch + 1}, {name} gave {left} items, for batches of {order.batch_size} with drop_last",
            "at least one whole batch",
            "use a smaller batch, or keep the last one",
        )
    return DataError(
        f"in epoch {epoch + 1}, {name} gave no item",
        "a stream of at least one",
        "__iter__ must start the stream anew each time" if epoch else "",
    )


def held(parts: Parts, seed: int, batches: int) -> Parts:
    """Return parts whose data set is a list of what the first ``batches`` batches of epoch 0 hold.

    Parts that are no stream come back as they are. For looking at samples by index, in a proof for example.
    Raises ``DataError`` for an empty stream.
    """
    order = parts.order
    if not isinstance(order, StreamOrder):
        return parts
    name = type(parts.dataset).__name__
    items = _Course(parts.dataset, seed, 0).take(batches * order.batch_size)
    if not items or (order.drop_last and len(items) < order.batch_size):
        raise empty(name, 0, order, len(items))
    keyed = KeyedOrder(len(items), order.batch_size, seed, shuffle=False, drop_last=order.drop_last)
    notices = [f"{name} is a stream: its first {len(items)} items are read into memory"]
    # What was said of reading a stream holds no longer; the size of a batch stays what it is.
    notices += [line for line in parts.notices if line.startswith(RESIZED)]
    return replace(parts, dataset=items, order=keyed, workers=0, worker_init=None, notices=notices)
