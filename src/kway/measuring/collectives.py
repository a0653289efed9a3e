"""Collectives as work to time, and what their time says of the links.

Algorithm bandwidth is size / time; bus bandwidth is that times a factor, after which it can be compared with what one
link of a rank carries, whatever the number n of ranks. Sizes and factors are those of NVIDIA's nccl-tests
(doc/PERFORMANCE.md there, and the sources for all-to-all and send-receive): the size is that of the larger of the two
buffers of a rank;

* all-reduce: 2 (n - 1) / n, since each of the n links carries 2 (n - 1) parts of 1 / n of the data;
* reduce-scatter, all-gather, all-to-all: (n - 1) / n;
* broadcast: 1, since all of it leaves one rank;
* point to point: 1. Each rank sends to the next one and receives from the one before at once, as sendrecv_perf does.
  Between GPUs through Gloo that goes by way of CPU memory.

kway's sum in one order (``kway.comm.tree``) does what an all-reduce does, and has its factor.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from kway.comm.group import Group
from kway.comm.tree import TreeReducer
from kway.measuring.work import Call

# Renamed in torch 2.13; the old names warn there, and the new ones do not exist before.
_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

ALL_REDUCE, POINT_TO_POINT, ORDERED = "all-reduce", "point to point", "ordered tree reduction"
# Bytes of an element of what is sent.
WIDTH = 4


@dataclass(frozen=True)
class Buffers:
    """Two vectors of float32 on a rank's device, of the largest size that is sent, and the group they go over.

    Zeros: what is summed up ten thousand times must not grow beyond what a float holds.
    """

    group: Group
    first: torch.Tensor
    second: torch.Tensor

    def pair(self, elements: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the first ``elements`` of each."""
        return self.first[:elements], self.second[:elements]


def _all_reduce(at: Buffers, elements: int) -> Call:
    tensor, _ = at.pair(elements)
    return lambda: dist.all_reduce(tensor, group=at.group.handle)


def _all_gather(at: Buffers, elements: int) -> Call:
    own, all_ = at.first[: elements // at.group.size], at.second[:elements]
    return lambda: _gather(all_, own, group=at.group.handle)


def _reduce_scatter(at: Buffers, elements: int) -> Call:
    all_, own = at.first[:elements], at.second[: elements // at.group.size]
    return lambda: _scatter(own, all_, group=at.group.handle)


def _all_to_all(at: Buffers, elements: int) -> Call:
    sent, received = at.pair(elements)
    return lambda: dist.all_to_all_single(received, sent, group=at.group.handle)


def _broadcast(at: Buffers, elements: int) -> Call:
    tensor, _ = at.pair(elements)
    return lambda: dist.broadcast(tensor, src=0, group=at.group.handle)


def _point_to_point(at: Buffers, elements: int) -> Call:
    sent, received = at.pair(elements)
    after, before = (at.group.rank + 1) % at.group.size, (at.group.rank - 1) % at.group.size
    handle = at.group.handle
    # Gloo reads what it sends from CPU memory, and does not look where a tensor lies.
    staged = sent.device.type != "cpu" and dist.get_backend(handle) == "gloo"
    out, into = (sent.cpu(), received.cpu()) if staged else (sent, received)

    def call() -> None:
        if staged:
            out.copy_(sent)
        both = [
            dist.P2POp(dist.isend, out, after, group=handle),
            dist.P2POp(dist.irecv, into, before, group=handle),
        ]
        for work in dist.batch_isend_irecv(both):
            work.wait()
        if staged:
            received.copy_(into)

    return call


def _ordered(at: Buffers, elements: int) -> Call:
    tensor, _ = at.pair(elements)
    size = at.group.size
    # The measured group has no trace: what it has seen would only grow.
    reducer = TreeReducer(at.group.apart(), size, [(rank, rank + 1) for rank in range(size)])
    (own,) = reducer.own
    return lambda: reducer.reduce({own: tensor})


# By name: how a call is made for so many elements, and the factor of its bus bandwidth among n ranks.
COLLECTIVES: dict[str, tuple[Callable[[Buffers, int], Call], Callable[[int], float]]] = {
    ALL_REDUCE: (_all_reduce, lambda n: 2 * (n - 1) / n),
    "all-gather": (_all_gather, lambda n: (n - 1) / n),
    "reduce-scatter": (_reduce_scatter, lambda n: (n - 1) / n),
    "all-to-all": (_all_to_all, lambda n: (n - 1) / n),
    "broadcast": (_broadcast, lambda n: 1.0),
    POINT_TO_POINT: (_point_to_point, lambda n: 1.0),
    ORDERED: (_ordered, lambda n: 2 * (n - 1) / n),
}


def elements_of(size: int, ranks: int) -> int:
    """Return how many elements are sent for a size in bytes: a multiple of the number of ranks, at least one each."""
    return max(size // WIDTH // ranks, 1) * ranks


def bus_factor(collective: str, ranks: int) -> float:
    """Return bus bandwidth / algorithm bandwidth; see above."""
    return COLLECTIVES[collective][1](ranks)
