"""A tensor of all samples of the global batch, for losses that compare samples with each other.

The gradient of sample i in a loss over all samples has a part on every device: backward adds up what all devices
found for the whole tensor, and each takes its own rows.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from math import prod
from typing import Any, Literal, overload

import torch

from kway.comm.group import Group
from kway.comm.rows import as_real
from kway.errors import RefusedError, UsageError
from kway.step.accompany import refuse_second_derivative
from kway.step.presence import Presence

Tensor = torch.Tensor
# Which batch the model that runs now computes. A variable of the context, so that nothing is left behind a step.
_CURRENT: ContextVar["WholeBatch | None"] = ContextVar("kway_whole_batch", default=None)


class WholeBatch:
    """How ``all_samples`` reaches the global batch: its shares lie on the ranks of ``group``, in order.

    ``shards``: the number of pieces into which a level cuts every batch in time.
    """

    def __init__(self, group: Group, presence: Presence, shards: int = 1) -> None:
        self.group, self.presence, self.shards = group, presence, shards

    @property
    def is_cut(self) -> bool:
        """Whether what is computed now may be only a part of it."""
        return self.group.size > 1 or self.shards > 1 or self.presence.pieces > 1

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make this the batch of what runs inside."""
        token = _CURRENT.set(self)
        try:
            yield
        finally:
            _CURRENT.reset(token)

    def follow(self, objective: Tensor) -> None:
        """Let it also be the batch of what is computed again in the backward pass of ``objective``.

        For a GPU that pass runs on a thread of autograd's own, to which no variable of a context goes. What the
        hook sets there is as short-lived as the thread's work for this pass: the next one sets it anew.
        """
        if objective.is_cuda:

            def enter(_: Tensor) -> None:
                _CURRENT.set(self)

            objective.register_hook(enter)  # type: ignore[no-untyped-call]

    def gathered(self, tensor: Tensor) -> tuple[Tensor, slice]:
        """Return the rows of all ranks and the place of this rank's. Raises as ``all_samples`` does."""
        if not tensor.dim():
            raise UsageError("kway.all_samples of a scalar", "the samples lie along dimension 0")
        if self.shards > 1:
            raise RefusedError(
                f"kway.all_samples at exactness bits with {self.shards} shards",
                "each shard of a batch is computed by itself: no device ever holds what the others will give",
                "use exactness math",
            )
        if self.presence.pieces > 1:
            raise RefusedError(
                f"kway.all_samples over a share in {self.presence.pieces} micro-batches",
                "the samples of the global batch must be there at once",
                "use a larger micro_batch, or more devices",
            )
        if self.group.size == 1:
            return tensor, slice(0, len(tensor))
        sizes = _sizes(tensor, self.group, self.presence.counts)
        start = sum(sizes[: self.group.rank])
        everything: Tensor = _Gather.apply(tensor, self.group, self.presence.counts, sizes)  # type: ignore[no-untyped-call]
        self.presence.meeting.add(everything)
        # A rank without samples runs with the first sample of the global batch.
        place = (
            slice(start, start + sizes[self.group.rank]) if self.presence.counts else slice(0, len(tensor))
        )
        return everything, place


@overload
def all_samples(tensor: Tensor, *, place: Literal[False] = False) -> Tensor: ...


@overload
def all_samples(tensor: Tensor, *, place: Literal[True]) -> tuple[Tensor, slice]: ...


def all_samples(tensor: Tensor, *, place: bool = False) -> Tensor | tuple[Tensor, slice]:
    """Return the rows of ``tensor``, shape (share, ...), of all devices: shape (global batch, ...), in global order.

    For a model's forward or a loss that compares all samples of the global batch with each other. Equal on every
    device; on one device, ``tensor`` itself. Differentiable: the gradient of a row is summed over the devices. With
    ``place=True`` also the slice in which this device's own rows lie: a loss returns those of its own samples. All
    devices must call it equally often.

    Raises ``UsageError`` outside of kway's steps; ``RefusedError`` where the batch is cut in time: micro-batches, or
    the shards of exactness bits; ``ValueError`` where the devices' rows have different shapes or dtypes.
    """
    batch = _CURRENT.get()
    if batch is None:
        raise UsageError(
            "kway.all_samples outside of a step",
            "it gathers from the devices that compute one batch",
            "call it in the model or the loss of a kway.Job, while kway trains, evaluates or predicts",
        )
    everything, own = batch.gathered(tensor)
    return (everything, own) if place else everything


def _sizes(tensor: Tensor, group: Group, counts: bool) -> list[int]:
    """Return how many rows each rank has. Back ends pair tensors of different shapes without a word."""
    kinds = (torch.finfo(tensor.dtype).bits if tensor.is_floating_point() else 0, tensor.element_size())
    row = (tensor.dim(), prod(tensor.shape[1:]), *kinds, int(tensor.is_complex()))
    header = torch.tensor([len(tensor) if counts else 0, *row], dtype=torch.int64, device=tensor.device)
    every = group.stack(header).tolist()
    for rank, (_, *other) in enumerate(every):
        if tuple(other) != row:
            raise ValueError(
                f"kway.all_samples: rank {group.rank} has rows of shape {tuple(tensor.shape[1:])} and dtype "
                f"{tensor.dtype}, rank {rank} others: all samples need one shape and one dtype"
            )
    return [size for size, *_ in every]


class _Gather(torch.autograd.Function):
    """``apply(x, group, counts, sizes)``: the rows of all ranks' x. A rank that does not count adds none."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        """Gather, padded to the longest share."""
        x, group, counts, sizes = args
        ctx.group, ctx.counts, ctx.sizes, ctx.rows = group, counts, sizes, len(x)
        padded = x.new_zeros(max(sizes), *x.shape[1:])
        if counts:
            padded[: len(x)] = x
        wire = padded.to(torch.uint8) if x.dtype == torch.bool else as_real(padded)
        every = group.stack(wire)
        whole = torch.cat([every[rank, :size] for rank, size in enumerate(sizes)])
        return torch.view_as_complex(whole) if x.is_complex() else whole.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        """Sum what all ranks found for the whole, and take the own rows."""
        refuse_second_derivative("kway.all_samples")
        ctx.met = True
        (dy,) = grads
        real = as_real(dy)
        total = real.to(torch.promote_types(real.dtype, torch.float32), copy=True)
        total = total.contiguous() if ctx.counts else torch.zeros_like(total).contiguous()
        ctx.group.sum_(total)
        start = sum(ctx.sizes[: ctx.group.rank])
        own = total[start : start + ctx.rows] if ctx.counts else total.new_zeros(ctx.rows, *total.shape[1:])
        own = own.to(real.dtype)
        return torch.view_as_complex(own) if dy.is_complex() else own, None, None, None
