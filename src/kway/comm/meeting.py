"""Where ranks meet apart from the collectives of their work, and wait for each other for a limited time only."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from kway.comm.group import Group


class Meeting:
    """A meeting of the ranks of ``group``, which is one of all ranks. To be made and closed by all of them.

    It goes over the CPU and by a group of its own: a rank that waits here disturbs nothing that others are inside of.
    Nobody looks at who waits: it is no collective that belongs to one of another rank's work.
    """

    def __init__(self, group: Group) -> None:
        handle = dist.new_group(backend="gloo") if group.size > 1 else None
        self._group = Group(group.rank, group.size, handle)

    def objects(self, value: Any, seconds: float) -> list[Any] | None:
        """Gather one picklable object of each rank, in rank order; ``None`` where not all came within ``seconds``."""
        if self._group.size > 1:
            try:
                here: Any = dist.all_reduce(torch.zeros(1), group=self._group.handle, async_op=True)
                here.wait(timedelta(seconds=seconds))
            except RuntimeError:
                return None
        return self._group.objects(value)

    def close(self) -> None:
        """Give back what it holds. Not where a rank is missing, who would be waited for."""
        if self._group.size > 1:
            dist.destroy_process_group(self._group.handle)


@contextmanager
def meeting(group: Group) -> Iterator[Meeting]:
    """Let the ranks of ``group`` meet while open. What is raised inside leaves it as it is: it ends the ranks."""
    made = Meeting(group)
    yield made
    made.close()
