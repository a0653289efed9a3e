"""A run is started again from the last complete checkpoint: on the devices that are left when ranks die, with fewer
samples at once or activation checkpointing when memory runs out.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, Self

from kway.errors import OutOfMemoryError, RankError, RefusedError, StallError, UsageError
from kway.jobs.adapting import Adapting
from kway.jobs.place import Place, choose, rank_threads
from kway.world import StopRequest


@dataclass(frozen=True)
class Restarts:
    """At most ``most`` restarts, on ``least`` devices at least. Raises ``UsageError`` for what cannot be."""

    most: int = 0
    least: int = 1

    def __post_init__(self) -> None:
        """Refuse counts that cannot be."""
        for what, value, smallest in (("max_restarts", self.most, 0), ("min_devices", self.least, 1)):
            if isinstance(value, bool) or not isinstance(value, int) or value < smallest:
                raise UsageError(f"{what}={value!r}", f"it must be a whole number of at least {smallest}")

    def check(self, devices: int, joined: bool) -> Self:
        """Return these. Raises ``UsageError`` where no restart could ever be on ``devices`` devices."""
        if self.most and joined:
            raise UsageError(
                f"max_restarts={self.most} inside ranks that another launcher started",
                "only who starts the ranks can start them again",
                "use that launcher's own, with resume=True",
            )
        if self.least > 1 and not self.most:
            raise UsageError(
                f"min_devices={self.least} without max_restarts", "nothing is ever started again"
            )
        if self.most and devices - 1 < self.least:
            raise UsageError(
                f"max_restarts={self.most} on {devices} of at least {self.least} devices",
                "without the device of a rank that dies too few are left",
                "use more devices, or a smaller min_devices",
            )
        return self


def _is_death(error: RankError) -> bool:
    """Whether something else than the user's code ended a rank, or it came no further."""
    return isinstance(error, StallError) or error.died


def without(where: Place, rank: int, shards: int) -> Place:
    """Return the place that is left when the device of ``rank`` is lost."""
    plan = where.plan
    left = [device for place, device in enumerate(plan.device_set) if place != rank]
    # The names of the axes without their sizes: each takes what there is.
    text = "auto" if len(left) == 1 else ":".join(plan.layout)
    chosen = replace(
        choose(left, text, plan.exactness, shards, plan.step_kind, plan.settings),
        reason=f"the device of rank {rank} was lost",
    )
    return replace(where, plan=chosen, threads=rank_threads(left))


def run_again(
    where: Place,
    once: Callable[[Place, int], list[Any]],
    restarts: Restarts,
    shards: int,
    note: Callable[[str], None],
    stop: StopRequest,
    adapting: Adapting | None = None,
) -> tuple[list[Any], Place]:
    """Call ``once(place, number)`` until it ends well; return its results, and where they came from.

    ``note`` takes a line for the user on what happened and what changes. ``number`` counts what was started before. A
    rank that died, stalled or lost its device leads to another try; what the user's code raises would be raised again,
    and so would kway's own errors, but for memory that ran out where ``adapting`` can. Nothing is started once ``stop``
    is set. Raises the ``RankError`` that was one too many, or left too few devices.
    """
    lost = 0
    for number in count():
        try:
            return once(where, number), where
        except OutOfMemoryError as error:
            if adapting is None or stop.by:
                raise
            note(adapting.smaller(error, where.plan))
            where = adapting.place(where)
        except RefusedError as refused:
            if adapting is None:
                raise
            reason = adapting.refused(refused)
            if reason is refused:
                raise
            raise reason from refused
        except RankError as error:
            left = where.plan.devices - 1
            if lost == restarts.most or left < restarts.least or stop.by or not _is_death(error):
                raise
            lost += 1
            where = without(where, error.rank, shards)
            devices = f"{left} device{'' if left == 1 else 's'}"
            note(
                f"restarted on {devices} ({', '.join(where.plan.device_set)}): {error.headline.splitlines()[0]}"
            )
    raise AssertionError("a try that is not followed by another one returns or raises")
