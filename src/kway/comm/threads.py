"""Collectives between ranks that are threads of one process: what they hand each other lies in memory that all see."""

import pickle
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch

from kway.comm.group import NOT_WATCHED, Group, Watch
from kway.comm.trace import Trace, Untraced
from kway.errors import MispairedError, RefusedError
from kway.flat import flat

# Below it each rank adds everything up by itself: one wait instead of two.
_SMALL = 16_384


class SharedProcess(Protocol):
    """Where the threads wait for each other: see ``kway.launch.shared_process``."""

    def post(self, key: Hashable, rank: int, value: Any) -> None:
        """Lay a value down."""

    def collect(self, key: Hashable, rank: int, what: object) -> list[Any]:
        """Wait for those of all ranks. ``LookupError``, here as below: in vain."""

    def spread(self, rank: int) -> None:
        """Go on without the turn."""

    def gather(self, rank: int) -> bool:
        """Take turns again; return whether anybody has drawn from the process's generators meanwhile."""


class _Handed:
    """A tensor as another thread may read it. On a GPU with the moment from which on its numbers are there."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self._ready: Any = None
        if tensor.is_cuda:
            self._ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._ready.record(torch.cuda.current_stream(tensor.device))

    def on(self, device: torch.device, part: slice = slice(None)) -> torch.Tensor:
        """Return entries ``part`` of the flat tensor on ``device``, where the current stream waits for them."""
        if self._ready is not None:
            # The copy runs on this thread's stream of the other device, and ends on its stream of its own.
            for place in {self.tensor.device, device}:
                stream = torch.cuda.current_stream(place)
                stream.wait_event(self._ready)
                self.tensor.record_stream(stream)
        return self.tensor[part].to(device, non_blocking=True)


class _Call(NamedTuple):
    """A collective, and where in which series: those of all ranks are to be equal."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype | None
    series: str
    number: int

    def __str__(self) -> str:
        of = "" if self.dtype is None else f" of {self.dtype}, shape {list(self.shape)}"
        series = f" of series {self.series}" if self.series else ""
        return f"in {self.name}{of} (call {self.number}{series})"


class ThreadGroup(Group):
    """All ranks of a job, as threads of ``process``. Sums are taken in rank order, so equal on each call.

    ``series``: the name of a course of collectives that goes by itself (see ``apart``); those of one are paired in
    their order.
    """

    one_process = True

    def __init__(
        self,
        process: SharedProcess,
        rank: int,
        size: int,
        trace: Trace | None = None,
        waiting: Watch = NOT_WATCHED,
        series: str = "",
    ) -> None:
        super().__init__(rank, size, trace=trace, waiting=waiting)
        self._process, self._series, self._calls, self._others = process, series, 0, 0

    def apart(self) -> "ThreadGroup":
        """Return the same ranks with a course of their own, and without a trace."""
        self._others += 1
        name = f"{self._series}/{self._others}"
        return ThreadGroup(self._process, self.rank, self.size, Untraced(self.trace), self.waiting, name)

    @contextmanager
    def side_by_side(self) -> Iterator[None]:
        """Let all ranks run at once while open, instead of in turns.

        Raises ``RefusedError`` where one has drawn, ``MispairedError`` where one does not come.
        """
        with _paired():
            self._process.spread(self.rank)
        # Not where something was raised inside: the others end where they wait next.
        yield
        with _paired():
            drew = self._process.gather(self.rank)
        if drew:
            raise RefusedError(
                "random numbers drawn on the CPU in a step, after first steps that drew none, with strategy threads",
                "a process has one generator: replicas that compute at once would draw from each other's numbers",
                "draw from the first step on, on the GPU or in the data set, or use strategy data",
            )

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum ``tensor`` over the ranks in place and return it. Equal bits on all ranks."""
        return tensor if self.size == 1 else self._begin_sum(tensor)()

    def begin_sum(self, tensor: torch.Tensor) -> Callable[[], None]:
        """Lay a flat tensor down for the others; what is returned waits for theirs and sums."""
        if self.size == 1:
            return lambda: None
        finish = self._begin_sum(tensor)

        def wait() -> None:
            finish()

        return wait

    def begin_sums(self, tensors: Sequence[torch.Tensor]) -> Callable[[], None]:
        """Start to sum each of some flat tensors: see ``begin_sum``."""
        return self._one_by_one(tensors)

    def _begin_sum(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        self.trace.note("sum", tensor.shape, tensor.dtype)
        own = tensor.detach().view(-1)
        begun = self._lay("all-reduce", _Handed(own.clone()), tensor.shape, tensor.dtype)
        length = -(-own.numel() // self.size)

        def added(handed: list[_Handed], part: slice) -> torch.Tensor:
            first, *others = (piece.on(own.device, part) for piece in handed)
            total = first.clone()
            for other in others:
                total += other
            return total

        def finish() -> torch.Tensor:
            handed = begun()
            if own.numel() < _SMALL:
                own.copy_(added(handed, slice(None)))
                return tensor
            # Each rank sums a slice, and hands it to the others.
            mine = added(handed, slice(self.rank * length, (self.rank + 1) * length))
            slices = self._lay("all-reduce", _Handed(mine))()
            for place, piece in enumerate(slices):
                own[place * length : (place + 1) * length].copy_(piece.on(own.device))
            return tensor

        return finish

    def stack(self, tensor: torch.Tensor, of: str = "") -> torch.Tensor:
        """Gather ``tensor`` (any shape S) of all ranks, in rank order, as one tensor of shape (size, *S).

        ``of``: whose numbers these are, for ``Trace.note``.
        """
        if self.size == 1:
            return tensor.unsqueeze(0)
        self.trace.note("stack", tensor.shape, tensor.dtype, of)
        own = flat(tensor.detach()).clone()
        handed = self._lay("all-gather", _Handed(own), tensor.shape, tensor.dtype)()
        return torch.stack([piece.on(own.device) for piece in handed]).view(self.size, *tensor.shape)

    def exchange(
        self, sent: torch.Tensor, sent_sizes: list[int], sizes: list[int]
    ) -> Callable[[], torch.Tensor]:
        """Send ``sent_sizes[r]`` entries of a flat tensor to each rank r; what is returned waits for theirs.

        It raises ``MispairedError`` where a rank r has sent another number than ``sizes[r]``.
        """
        if self.size == 1:
            return sent.clone
        self.trace.note("exchange", (), sent.dtype)
        laid = _Handed(sent.detach().clone()), tuple(sent_sizes)
        begun = self._lay("all-to-all", laid, dtype=sent.dtype)

        def answer() -> torch.Tensor:
            parts = []
            for rank, ((piece, counts), awaited) in enumerate(zip(begun(), sizes, strict=True)):
                if counts[self.rank] != awaited:
                    raise _mispaired(
                        f"rank {self.rank} awaits {awaited} entries of rank {rank} in all-to-all, which sent "
                        f"{counts[self.rank]}"
                    )
                start = sum(counts[: self.rank])
                parts.append(piece.on(sent.device, slice(start, start + awaited)))
            return torch.cat(parts)

        return answer

    def broadcast_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Overwrite ``tensor``, which is contiguous, with the first rank's values and return it."""
        if self.size > 1:
            self.trace.note("broadcast", tensor.shape, tensor.dtype)
            own = tensor.detach().view(-1)
            handed = _Handed(own.clone()) if self.rank == 0 else None
            first = self._lay("broadcast", handed, tensor.shape, tensor.dtype)()[0]
            if self.rank:
                own.copy_(first.on(own.device))
        return tensor

    def objects(self, value: Any) -> list[Any]:
        """Gather one picklable object of each rank, in rank order, on all ranks: copies, as from another process."""
        if self.size == 1:
            return [value]
        self.trace.note("objects")
        return [pickle.loads(found) for found in self._lay("all-gather of objects", pickle.dumps(value))()]

    def barrier(self, at: str = "barrier") -> None:
        """Wait until all ranks of the group are here."""
        if self.size > 1:
            self.trace.note("barrier")
            self._lay("barrier", None)()

    def _lay(
        self, name: str, value: Any, shape: tuple[int, ...] = (), dtype: torch.dtype | None = None
    ) -> Callable[[], list[Any]]:
        """Lay a value down for the collective ``name``; what is returned waits for those of all ranks.

        Raises ``MispairedError`` where another rank called another collective, has left, or waits for what no rank
        comes to.
        """
        self._calls += 1
        key = (self._series, self._calls)
        call = _Call(name, tuple(shape), dtype, *key)
        self._process.post(key, self.rank, (call, value))

        def wait() -> list[Any]:
            with _paired(), self.waiting.inside(name):
                found = self._process.collect(key, self.rank, call)
            for rank, (other, _) in enumerate(found):
                if other != call:
                    raise _mispaired(f"rank {self.rank} is {call} and rank {rank} {other}")
            return [each for _, each in found]

        return wait


@contextmanager
def _paired() -> Iterator[None]:
    try:
        yield
    except LookupError as unmet:
        raise _mispaired(str(unmet.args[0])) from None


def _mispaired(got: str) -> MispairedError:
    return MispairedError(
        got,
        "all ranks must call the same collectives in the same order",
        "look for a branch on the rank, or on data, around a batch, a layer or a collective",
    )
