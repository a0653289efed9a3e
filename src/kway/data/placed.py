"""Data that fits on the device stays there: batches are taken from it, and the host reads nothing.

The samples of each batch, their order and their bits are those that the host would have read.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from kway.data.arrays import InMemory, Rows, each, leaves
from kway.data.device_order import order_on
from kway.data.device_rows import bytes_needed, copied, reader, versions
from kway.data.order import Indices, KeyedOrder
from kway.data.parts import Parts
from kway.data.share import Outline, Share

Tensor = torch.Tensor
MOST_OF_FREE = (
    4  # data takes at most a quarter of what is free: weights, activations and other data want room
)
# Batches of several steps are taken at once: few large launches instead of many small ones.
_MOST_STEPS, _MOST_BYTES = 32, 64 << 20
_ALIGNED = 512  # bytes: where torch's own allocations begin, so that kernels find what they would have found


def fits(needed: int, free: int) -> bool:
    """Whether data of ``needed`` bytes is kept on a device with ``free`` bytes: at most a quarter of them."""
    return needed * MOST_OF_FREE <= free


def place(
    parts: Parts, device: torch.device, outline: Callable[[Indices, int, int], Outline], free: int
) -> "Placed | None":
    """Copy the data of ``parts`` to ``device``, which has ``free`` bytes; ``None`` where it does not belong there.

    It does where it lies in memory and is read as it is (no collate), its order is arithmetic and it ``fits``.
    """
    order = parts.order
    if (
        parts.collate is not None
        or not isinstance(order, KeyedOrder)
        or not isinstance(parts.dataset, InMemory)
    ):
        return None
    rows = parts.dataset.rows()
    needed = None if rows is None else bytes_needed(rows, order, device)
    if rows is None or needed is None or not fits(needed, free):
        return None
    try:
        return Placed(rows, order, device, outline)
    except torch.OutOfMemoryError:
        return None  # taken by another process meanwhile


class PlacedShare(Share):
    """A share on the device. ``indices`` are worked out, on the host, when they are first asked for.

    Training does not ask, and working them out takes longer than a fast step.
    """

    @classmethod
    def of(
        cls, micro: list[tuple[Any, int]], cut: "_Cut", epoch: int, step: int, find: Callable[[], Indices]
    ) -> "PlacedShare":
        """Make a share; ``find()`` returns its indices."""
        share = object.__new__(cls)
        known = {"micro": micro, "count": cut.count, "total": cut.total, "epoch": epoch, "step": step}
        for name, value in {**known, "_find": find}.items():
            object.__setattr__(share, name, value)
        return share

    def __getattr__(self, name: str) -> Any:
        # Reached only for what the instance does not hold yet.
        if name != "indices" or "_find" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        found = self.__dict__["_find"]()
        object.__setattr__(self, "indices", found)
        return found


@dataclass(frozen=True)
class _Cut:
    """Where a global batch of ``total`` samples is cut for this rank, which holds ``count`` from ``first`` on.

    ``pieces``: for each micro-batch, positions from where to where, and how many samples count.
    """

    pieces: list[tuple[int, int, int]]
    first: int
    count: int
    total: int


class Placed:
    """The arrays of a data set on ``device``, and this rank's shares taken from them.

    ``outline(batch, epoch, step)`` cuts a global batch as for a loader on the host. Raises
    ``torch.OutOfMemoryError`` where the device has no room.
    """

    def __init__(
        self,
        rows: Rows,
        order: KeyedOrder,
        device: torch.device,
        outline: Callable[[Indices, int, int], Outline],
    ) -> None:
        self.order, self.device, self._outline, self._rows = order, device, outline, rows
        self._readers: Any = None
        self._versions: list[int] = []
        self._copy()
        self.bytes = bytes_needed(rows, order, device) or 0
        self._cuts: dict[int, _Cut] = {}
        self._at_once = 0
        # The number of an epoch and its order.
        self._ready: tuple[int, Tensor] | None = None

    def _copy(self) -> None:
        self._readers = None  # what is there has no room beside what comes
        self._versions = versions(self._rows)
        self._readers = each(
            self._rows.arrays, lambda leaf: reader(copied(leaf, self._rows.chosen, self.device))
        )

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Share]:
        """Yield this rank's share of each global batch of an epoch, from step ``start`` on.

        Tensors of the host that were changed in place since the last epoch are copied anew. Arrays of numpy do not
        say whether they were.
        """
        if versions(self._rows) != self._versions:
            self._copy()
        size, step = self.order.batch_size, start
        ready, self._ready = self._ready, None
        order = ready[1] if ready and ready[0] == epoch else order_on(self.device, self.order, epoch)
        whole = self.order.samples // size
        while step < self.order.steps(epoch):
            cut = self._cut(min(size, self.order.samples - step * size))
            if step < whole and self._at_once > 1:
                taken = min(self._at_once, whole - step)
                yield from self._together(order, cut, epoch, step, taken)
                step += taken
                continue
            base = step * size
            micro = [
                (self._take(order[base + begin : base + end]), count) for begin, end, count in cut.pieces
            ]
            if not self._at_once and step < whole:
                self._at_once = _at_once(micro)
            yield self._share(micro, cut, epoch, step)
            step += 1
        # The device is still at the last steps: worked out later, it would wait for the next order. After the last
        # epoch of a run, which nobody knows here, these are some launches for nothing. There is room for one order.
        del order
        self._ready = epoch + 1, order_on(self.device, self.order, epoch + 1)

    def _together(self, order: Tensor, cut: _Cut, epoch: int, step: int, taken: int) -> Iterator[Share]:
        """Take the batches of ``taken`` whole steps at once, and hand them out one by one."""
        size, held = cut.total, cut.count
        rows = order[step * size : (step + taken) * size].view(taken, size)
        batches = self._take(rows[:, cut.first : cut.first + held].reshape(-1))
        for nth in range(taken):
            shift = nth * held - cut.first
            micro = [
                (each(batches, partial(_part, begin=shift + begin, end=shift + end)), count)
                for begin, end, count in cut.pieces
            ]
            yield self._share(micro, cut, epoch, step + nth)

    def _share(self, micro: list[tuple[Any, int]], cut: _Cut, epoch: int, step: int) -> Share:
        find = partial(_indices_of, self.order, epoch, step, cut.first, cut.count)
        return PlacedShare.of(micro, cut, epoch, step, find)

    def _take(self, rows: Tensor) -> Any:
        return self._rows.made(each(self._readers, lambda read: read(rows)))

    def _cut(self, total: int) -> _Cut:
        if total not in self._cuts:
            # The outline of positions instead of indices: where they lie is the same in every batch of this size.
            found = self._outline(np.arange(total, dtype=np.int64), 0, 0)
            pieces = [
                (int(request.indices[0]), int(request.indices[-1]) + 1, count)
                for request, count in found.requests
            ]
            first = int(found.indices[0]) if len(found.indices) else 0
            self._cuts[total] = _Cut(pieces, first, len(found.indices), total)
        return self._cuts[total]


def _indices_of(order: KeyedOrder, epoch: int, step: int, first: int, count: int) -> Indices:
    return order.batch(epoch, step)[first : first + count]


def _part(batches: Tensor, begin: int, end: int) -> Tensor:
    # .data: a tensor of its own for autograd, that the model may change in place; slices would count as views.
    return batches[begin:end].data


def _at_once(micro: list[tuple[Any, int]]) -> int:
    """Return how many steps' batches may be taken at once, from those of one whole step.

    One where a piece would begin at another alignment than a tensor of its own: what kernels give may depend on it.
    """
    sizes: list[int] = [leaf.nbytes for batch, _ in micro for leaf in leaves(batch)]
    if any(size % _ALIGNED for size in sizes) or not all(count for _, count in micro):
        return 1
    return max(1, min(_MOST_STEPS, _MOST_BYTES // max(1, sum(sizes))))
