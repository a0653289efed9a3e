"""Where a process stands among the ranks of its job. Plain data: only ``kway.launch`` fills it in."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class World:
    """One process's place in a job.

    ``rank`` of ``size`` over all machines, ``local_rank`` of ``local_size`` on this one. ``device`` is a
    torch device string (``cpu`` or ``cuda:1``), ``backend`` the name of the collective back end (``gloo`` or
    ``nccl``), ``threads`` the number of intra-op CPU threads of this rank. ``origin`` says who made the rank:
    ``alone`` (the user's own process, no process group), ``local`` (kway started it), ``env`` (another
    launcher, through ``RANK`` and ``WORLD_SIZE`` or the variables of MPI, or the script itself with a process group) or
    ``threads`` (a thread of the user's own process: ``groups`` makes the group of all ranks then). ``cores``: how
    many logical processors the ranks of this machine share, where a launcher has bound each to a part (0: it has not).
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    device: str = "cpu"
    backend: str = "gloo"
    threads: int = 1
    origin: str = "alone"
    groups: Callable[..., Any] | None = field(default=None, compare=False, repr=False)
    cores: int = field(default=0, compare=False)

    @property
    def processes(self) -> int:
        """How many processes the ranks are."""
        return self.size if self.groups is None else 1

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which prints and writes files."""
        return self.rank == 0


@dataclass
class StopRequest:
    """Whether this process was asked to stop its work at the next good moment. ``by``: the signal's name, or ``""``.

    Set by a signal handler or another thread, read by the work. ``task``: the task of kept ranks that it is for.
    ``direct``: whether the signal came to this process itself, and not to the one that started it.
    """

    by: str = ""
    task: int = 0
    direct: bool = False
