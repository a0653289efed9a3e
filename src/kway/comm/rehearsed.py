"""A group of which one rank is there alone: it does all that a rank of several does, and hears its own numbers back.

What a rank of k computes and packs can then be timed, and which collectives it calls can be counted, on one device.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kway.comm.group import NOT_WATCHED, Group, Watch
from kway.comm.trace import Trace, Untraced


@dataclass(frozen=True)
class Call:
    """One collective: at which part of a step, what, how many bytes this rank gave, and whether of gradients."""

    when: str
    what: str
    bytes: int
    gradients: bool


class Calls:
    """Takes note of collectives while ``noting``. ``when``: the part of the step that runs now."""

    def __init__(self) -> None:
        self.noting, self.when = False, "step"
        self.made: list[Call] = []

    def note(self, what: str, size: int, gradients: bool) -> None:
        """Take note of one call with ``size`` bytes of this rank."""
        if self.noting:
            self.made.append(Call(self.when, what, size, gradients))


class RehearsedGroup(Group):
    """Rank 0 of ``size`` ranks that all hold what it holds, as far as anybody can tell.

    Gathers return its own numbers ``size`` times, sums leave them as they are: results have the shapes of real ones,
    and their numbers mean nothing. ``calls`` takes note of each. What goes over ``apart`` counts as gradients.
    """

    def __init__(
        self,
        calls: Calls,
        rank: int = 0,
        size: int = 1,
        trace: Trace | None = None,
        waiting: Watch = NOT_WATCHED,
        gradients: bool = False,
    ) -> None:
        super().__init__(rank, size, trace=trace, waiting=waiting)
        self._calls, self._gradients = calls, gradients

    def apart(self) -> "RehearsedGroup":
        """Return the same ranks without a trace."""
        return RehearsedGroup(self._calls, self.rank, self.size, Untraced(self.trace), self.waiting, True)

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Leave ``tensor`` as it is."""
        self._note("sum", "all-reduce", tensor)
        return tensor

    def begin_sum(self, tensor: torch.Tensor) -> Callable[[], None]:
        """Leave a flat tensor as it is."""
        self.sum_(tensor)
        return lambda: None

    def begin_sums(self, tensors: Sequence[torch.Tensor]) -> Callable[[], None]:
        """Leave flat tensors as they are, which travel together."""
        for tensor in tensors:
            self.trace.note("sum", tensor.shape, tensor.dtype)
        self._calls.note("all-reduce", sum(tensor.nbytes for tensor in tensors), self._gradients)
        return lambda: None

    def stack(self, tensor: torch.Tensor, of: str = "") -> torch.Tensor:
        """Return ``tensor`` (any shape S) as every rank's, shape (size, *S); ``of``: see ``Group.stack``."""
        self._note("stack", "all-gather", tensor, of)
        return torch.stack([tensor.detach()] * self.size)

    def exchange(
        self, sent: torch.Tensor, sent_sizes: list[int], sizes: list[int]
    ) -> Callable[[], torch.Tensor]:
        """Return zeros as what the others sent: ``sizes[r]`` entries from r."""
        self._note("exchange", "all-to-all", sent)
        return lambda: sent.new_zeros(sum(sizes))

    def broadcast_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Leave ``tensor`` as it is."""
        self._note("broadcast", "broadcast", tensor)
        return tensor

    def objects(self, value: Any) -> list[Any]:
        """Return one's own object as everybody's."""
        return [value] * self.size

    def barrier(self, at: str = "barrier") -> None:
        """Wait for nobody."""

    def _note(self, name: str, what: str, tensor: torch.Tensor, of: str = "") -> None:
        self.trace.note(name, tensor.shape, tensor.dtype, of)
        self._calls.note(what, tensor.nbytes, self._gradients)
