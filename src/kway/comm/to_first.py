"""Hands what may be large to the first rank alone, through the memory of hosts."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from kway.comm.group import Group

# Ranks come to it from a collective: none waits here for a step of another.
_LIMIT = timedelta(minutes=2)


def to_first(group: Group, value: Any) -> list[Any] | None:
    """Gather one picklable object of each rank on the first one, in rank order; ``None`` on the others. A collective.

    ``group``: one of all ranks, which have just met. Unlike ``Group.objects``, which sends all to all and through the
    memory of GPUs where these are the devices. Raises ``RuntimeError`` where hosts do not reach each other; the group
    itself is then as it was, unless it goes through hosts too.
    """
    if group.size == 1:
        return [value]
    group.trace.note("to first")
    gathered: list[Any] | None = None if group.rank else [None] * group.size
    with group.waiting.inside("gather of objects"), _between_hosts(group) as handle:
        dist.gather_object(value, gathered, group=handle, group_dst=0)
    return gathered


@contextmanager
def _between_hosts(group: Group) -> Iterator[Any]:
    """Yield torch's handle of a group of the same ranks over Gloo: its own, or one that is there while open."""
    if dist.get_backend(group.handle) == "gloo":
        yield group.handle
        return
    handle = dist.new_group(backend="gloo", timeout=_LIMIT)
    yield handle
    # Not where it failed: a rank that is missing would be waited for.
    dist.destroy_process_group(handle)
