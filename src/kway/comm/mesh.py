"""Named axes over the ranks of a job, and the group of ranks along each."""

from collections.abc import Callable, Mapping
from datetime import timedelta
from itertools import product
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from kway.comm.group import NOT_WATCHED, Group, Watch
from kway.errors import UsageError


class Mesh:
    """Ranks laid out row-major over named axes: the last axis varies fastest.

    ``layout`` maps axis names to sizes, outermost first; an empty layout is one device. Making a mesh is a
    collective: torch wants every rank to take part in making every group. ``waiting``: see ``Group``. ``make``: makes
    the group of all ranks, where that is none of torch's; there is one axis then.
    """

    def __init__(
        self,
        layout: Mapping[str, int],
        rank: int,
        size: int,
        waiting: Watch = NOT_WATCHED,
        make: Callable[..., Group] | None = None,
    ) -> None:
        self.layout, self.rank, self.size = dict(layout), rank, size
        if prod(self.layout.values()) != size:
            text = ":".join(f"{axis}={count}" for axis, count in self.layout.items()) or "single"
            raise UsageError(f"layout {text} over {size} ranks", f"it needs {prod(self.layout.values())}")
        self.world = (make or Group)(rank, size, waiting=waiting)
        self._groups = {axis: self._make(axis) for axis in self.layout}

    def group(self, axis: str) -> Group:
        """Return the group of the ranks that differ from this one along ``axis`` only."""
        return self._groups[axis]

    def coordinate(self, axis: str) -> int:
        """Return this rank's place along ``axis``, from 0."""
        return self._groups[axis].rank

    def _make(self, axis: str) -> Group:
        if self.layout[axis] == self.size:
            return self.world
        mine = None
        others = [range(count) if name != axis else range(1) for name, count in self.layout.items()]
        for corner in product(*others):
            ranks = [self._flat(corner, axis, place) for place in range(self.layout[axis])]
            handle = dist.new_group(ranks, timeout=_time_limit()) if len(ranks) > 1 else None
            if self.rank in ranks:
                mine = Group(
                    ranks.index(self.rank),
                    len(ranks),
                    handle,
                    ranks,
                    self.world.trace,
                    self.world.waiting,
                )
        assert mine is not None
        return mine

    def _flat(self, corner: tuple[int, ...], axis: str, place: int) -> int:
        flat = 0
        for (name, count), at in zip(self.layout.items(), corner, strict=True):
            flat = flat * count + (place if name == axis else at)
        return flat


def _time_limit() -> timedelta | None:
    """Return how long the collectives of all ranks may take. Torch gives a new group its own default instead."""
    group: Any = dist.group.WORLD
    device = torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
    limit: timedelta | None = group._get_backend(device).options._timeout
    return limit
