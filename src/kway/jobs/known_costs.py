"""What a plan rests on: the job's workload on each type of device, and measurements of the machine; from records,
from the cache, or taken now.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kway.errors import UsageError
from kway.measurements import Measurements
from kway.step.kinds import KINDS
from kway.workload import Workload

if TYPE_CHECKING:
    from kway.jobs.planning import Asked

# The experiments that prices of several devices are made of.
EXPERIMENTS = ("collectives", "overlap")


@dataclass(frozen=True)
class Known:
    """``workloads`` by type of device; ``measurements``, ``None`` where one device is all there is."""

    workloads: Mapping[str, Workload]
    measurements: Measurements | None
    notices: Sequence[str] = field(default=())

    def step_kinds(self, device_type: str, named: Sequence[str] | None) -> list[str]:
        """Return the step kinds that were timed on a type of device, of those that are ``named``."""
        timed = self.workloads[device_type].step_kinds()
        return [kind for kind in timed if named is None or kind in named]

    def kinds_left(self, named: Sequence[str] | None) -> list[dict[str, Any]]:
        """Return rows of a plan's ``left`` for the step kinds that were not timed."""
        return [
            {"strategy": "any", "devices": 0, "device_set": [each.device], "step_kind": kind, "why": why}
            for each in self.workloads.values()
            for kind, why in each.step_kinds_left.items()
            if named is None or kind in named
        ]


def gather(
    asked: "Asked",
    workloads: Sequence[Workload],
    measurements: Measurements | None,
    ranks: Any,
    say: Callable[[str], None],
) -> Known:
    """Return what prices are made of. What is given is not taken again. Raises ``UsageError`` for what does not fit."""
    given = {each.device.partition(":")[0]: _of_job(each, asked) for each in workloads}
    found = {
        kind: given[kind] if kind in given else profiled(asked, kind, say) for kind in asked.device_types
    }
    several = any(len(devices) > 1 for devices in asked.sets)
    if measurements is None and several:
        measurements = measured(asked, ranks, say)
    return Known(found, measurements)


def _of_job(workload: Workload, asked: "Asked") -> Workload:
    """Return a workload that was given. Raises ``UsageError`` where it is of another job."""
    for what, got, need in (
        ("model", workload.model, asked.job.title),
        ("precision", workload.precision, asked.job.precision),
        ("level", workload.level, asked.level),
    ):
        if got != need:
            raise UsageError(f"a workload of {what} {got}", f"the job has {need}", "profile the job anew")
    return workload


def profiled(asked: "Asked", device_type: str, say: Callable[[str], None]) -> Workload:
    """Profile the job on one device of a type."""
    from kway.jobs.profiling import profile

    raise NotImplementedError(profile, KINDS, say)


def measured(asked: "Asked", ranks: Any, say: Callable[[str], None]) -> Measurements:
    """Return measurements of this machine: remembered ones, or quick ones that are taken now."""
    from kway.jobs.measuring import measure

    return measure(only=EXPERIMENTS, quick=True, ranks=ranks, say=say)
