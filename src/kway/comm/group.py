"""Collectives over one group of ranks. A group of one rank does nothing, so callers need no branch."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, Protocol

import torch
import torch.distributed as dist

from kway.comm.trace import Trace, Untraced
from kway.flat import flat

# The collective was renamed in torch 2.13; the old name warns there, the new one does not exist before.
_gather_flat: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

# A private part of torch: without it collectives are begun one by one.
_together: Any = getattr(dist, "_coalescing_manager", None)

# What every back end can send. Tensors of other dtypes travel as bytes, where nothing is added up.
_KNOWN = frozenset(
    {
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int8,
        torch.uint8,
    }
)


class Watch(Protocol):
    """Looks at a rank's progress: what ``inside`` returns is open while the rank is inside a collective."""

    def inside(self, name: str) -> AbstractContextManager[Any]:
        """Return what is open while this rank is inside a collective of that name."""

    def begun(self) -> None:
        """A collective was handed to a device, which the host does not wait for."""


class _NotWatched:
    def inside(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()

    def begun(self) -> None:
        pass


# For ranks whose progress nobody looks at.
NOT_WATCHED = _NotWatched()
_GOES_ON = nullcontext()


class Group:
    """The ranks along one mesh axis. ``handle`` is torch's process group (``None``: all ranks of the job).

    Every method but ``rank`` and ``size`` is a collective: all ranks of the group must call it, in the same
    order, with tensors of the same shape and dtype. ``trace`` takes note of each;
    ``waiting`` is told while this rank is inside one. ``one_process``: whether its ranks are threads.
    """

    one_process: ClassVar[bool] = False

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        handle: Any = None,
        ranks: list[int] | None = None,
        trace: Trace | None = None,
        waiting: Watch = NOT_WATCHED,
    ) -> None:
        self.rank, self.size, self.handle = rank, size, handle
        self.waiting, self._connected = waiting, False
        self.ranks = ranks if ranks is not None else list(range(size))
        self.trace = Trace() if trace is None else trace

    def apart(self) -> "Group":
        """Return the same group without a trace: for collectives that ranks start at different times."""
        return Group(self.rank, self.size, self.handle, self.ranks, Untraced(self.trace), self.waiting)

    def side_by_side(self) -> AbstractContextManager[None]:
        """Return what is open while ranks run at once that else take turns: processes never do."""
        return nullcontext()

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum ``tensor`` over the ranks in place and return it. Equal bits on all ranks."""
        if self.size > 1:
            self.trace.note("sum", tensor.shape, tensor.dtype)
            with self._inside("all-reduce", tensor):
                dist.all_reduce(tensor, group=self.handle)
        return tensor

    def begin_sum(self, tensor: torch.Tensor) -> Callable[[], None]:
        """Start to sum a flat tensor over the ranks in place, beside whatever follows; what is returned waits for it.

        On a GPU the current stream waits, and from the beginning.
        """
        if self.size == 1 or tensor.device.type != "cpu":
            self.sum_(tensor)
            return _nothing
        self.trace.note("sum", tensor.shape, tensor.dtype)
        work = dist.all_reduce(tensor, group=self.handle, async_op=True)

        def wait() -> None:
            with self.waiting.inside("all-reduce"):
                work.wait()

        return wait

    def begin_sums(self, tensors: Sequence[torch.Tensor]) -> Callable[[], None]:
        """Start to sum each of some flat tensors on one device: see ``begin_sum``. On a GPU they are one collective."""
        if len(tensors) < 2 or self.size == 1 or _together is None or tensors[0].device.type == "cpu":
            return self._one_by_one(tensors)
        self.trace.note("sum", tuple(tensor.numel() for tensor in tensors), tensors[0].dtype)
        with (
            self._inside("all-reduce", tensors[0]),
            _together(group=self.handle, device=tensors[0].device),
        ):
            for tensor in tensors:
                dist.all_reduce(tensor, group=self.handle)
        return _nothing

    def _one_by_one(self, tensors: Sequence[torch.Tensor]) -> Callable[[], None]:
        begun = [self.begin_sum(tensor) for tensor in tensors]

        def wait() -> None:
            for end in begun:
                end()

        return wait

    def stack(self, tensor: torch.Tensor, of: str = "") -> torch.Tensor:
        """Gather ``tensor`` (any shape S) of all ranks, in rank order, as one tensor of shape (size, *S).

        ``of``: whose numbers these are, for ``Trace.note``.
        """
        if self.size == 1:
            return tensor.unsqueeze(0)
        self.trace.note("stack", tensor.shape, tensor.dtype, of)
        sent = _sendable(flat(tensor))
        gathered = sent.new_empty((self.size * sent.numel(),))
        with self._inside("all-gather", sent):
            _gather_flat(gathered, sent, group=self.handle)
        return gathered.view(tensor.dtype).reshape(self.size, *tensor.shape)

    def exchange(
        self, sent: torch.Tensor, sent_sizes: list[int], sizes: list[int]
    ) -> Callable[[], torch.Tensor]:
        """Send ``sent_sizes[r]`` entries of a flat tensor to each rank r, beside whatever follows.

        What is returned waits for the answer and gives it: ``sizes[r]`` entries from r. On a GPU the current
        stream waits, not the caller.
        """
        if self.size == 1:
            return sent.clone
        self.trace.note("exchange", (), sent.dtype)
        received = sent.new_empty(sum(sizes))
        work = dist.all_to_all_single(received, sent, sizes, sent_sizes, group=self.handle, async_op=True)

        def answer() -> torch.Tensor:
            with self.waiting.inside("all-to-all"):
                work.wait()
            return received

        return answer

    def broadcast_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Overwrite ``tensor``, which is contiguous, with the first rank's values and return it."""
        if self.size > 1:
            self.trace.note("broadcast", tensor.shape, tensor.dtype)
            with self._inside("broadcast", tensor):
                dist.broadcast(_sendable(tensor.view(-1)), src=self.ranks[0], group=self.handle)
        return tensor

    def objects(self, value: Any) -> list[Any]:
        """Gather one picklable object of each rank, in rank order, on all ranks."""
        if self.size == 1:
            return [value]
        self.trace.note("objects")
        gathered: list[Any] = [None] * self.size
        with self.waiting.inside("all-gather of objects"):
            dist.all_gather_object(gathered, value, group=self.handle)
        return gathered

    def barrier(self, at: str = "barrier") -> None:
        """Wait until all ranks of the group are here. ``at``: what those who look at this rank are told."""
        if self.size > 1:
            self.trace.note("barrier")
            with self.waiting.inside(at):
                dist.barrier(group=self.handle)

    def _inside(self, name: str, tensor: torch.Tensor) -> AbstractContextManager[Any]:
        """Return what is open during a collective on ``tensor``.

        One on a GPU is only begun by the host, which then goes on; but for the first there, which connects the ranks.
        """
        if tensor.device.type == "cpu":
            return self.waiting.inside(name)
        if not self._connected:
            self._connected = True
            return self.waiting.inside(name)
        self.waiting.begun()
        return _GOES_ON


def _nothing() -> None:
    pass


def _sendable(flat: torch.Tensor) -> torch.Tensor:
    """Return a flat tensor as something that every back end can send, in the same memory."""
    return flat if flat.dtype in _KNOWN else flat.view(torch.uint8)
