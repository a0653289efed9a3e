"""Schedules that were counted in epochs, as torch's examples have them, and that go on with each optimizer step."""

from bisect import bisect_right
from math import inf, prod
from typing import Any

from torch.optim.lr_scheduler import ChainedScheduler, ExponentialLR, MultiStepLR, SequentialLR, StepLR

from kway.data.parts import Parts
from kway.step.scaling import Scaled
from kway.training.spec import TrainSpec
from kway.units import counted

# What is left of a learning rate within one epoch, that nobody means.
FADED = 1e-4


def fading(spec: TrainSpec, parts: Parts, schedule: Any) -> list[str]:
    """Say that a ``schedule`` of torch's takes nearly all of the learning rate away within the first epoch.

    Or within the run, where that is shorter. Of what torch puts together those count that multiply at each step.
    """
    own = schedule.own if isinstance(schedule, Scaled) else schedule
    each = parts.order.steps(0) if parts.order.digest(0) is None else None
    if each is None:
        return []
    taken = each if spec.steps is None else min(each, spec.steps)
    parts_left = _left(own, taken)
    left = prod(parts_left.values())
    if not 0 <= left < FADED:
        return []
    named = ", ".join(name for name, part in parts_left.items() if part < 1)
    when = "the first epoch" if taken == each else counted(taken, "step")
    return [
        f"schedule: {named} goes on with each optimizer step, of which an epoch has {each:,}: after {when} "
        f"{left:.0e} of the learning rate is left; counted in epochs it takes {each:,} times as many steps"
    ]


def _left(schedule: Any, steps: int) -> dict[str, float]:
    """Return by class what is left of the rate after ``steps`` steps; nothing of schedulers that are not known."""
    if isinstance(schedule, ChainedScheduler):
        found: dict[str, float] = {}
        for each in schedule._schedulers:
            for name, part in _left(each, steps).items():
                found[name] = found.get(name, 1.0) * part
        return found
    if isinstance(schedule, SequentialLR):
        # Each begins with the whole rate, at its milestone.
        begun = [0, *schedule._milestones]
        at = bisect_right(begun, steps) - 1
        return _left(schedule._schedulers[at], steps - begun[at])
    times = _times(schedule, steps)
    return {} if times is None else {type(schedule).__name__: _power(schedule.gamma, times)}


def _times(schedule: Any, steps: int) -> int | None:
    """Return how often a scheduler multiplies the rate with its ``gamma`` in ``steps`` steps; ``None``: not known."""
    if isinstance(schedule, StepLR):
        return steps // schedule.step_size
    if isinstance(schedule, MultiStepLR):
        return sum(count for at, count in schedule.milestones.items() if at <= steps)
    return steps if isinstance(schedule, ExponentialLR) else None


def _power(gamma: float, times: int) -> float:
    try:
        return float(gamma**times)
    except OverflowError:
        return inf
