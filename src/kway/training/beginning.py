"""What a run says of itself when it begins."""

from collections.abc import Mapping
from typing import Any

from torch.optim.lr_scheduler import OneCycleLR

from kway.data.parts import Parts
from kway.errors import UsageError
from kway.step.kinds import kind_of
from kway.step.scaling import Scaled
from kway.training.spec import TrainSpec
from kway.units import counted


def start_of(
    spec: TrainSpec,
    parts: Parts,
    steps: int | None,
    resumed: int | None,
    subject: Mapping[str, Any],
    step_kind: str,
) -> dict[str, Any]:
    """Return the event ``start``. ``steps`` of the first epoch, ``resumed``: those taken before, where they are known.

    ``subject``: the record's, with ``optimizer``. ``step_kind``: the one that steps have, a simpler one than asked for
    where a compiler lacks.
    """
    return {
        "event": "start",
        "epochs": spec.epochs,
        "steps_per_epoch": steps,
        "stops_after": spec.steps,
        "samples": parts.order.samples,
        "devices": spec.plan.devices,
        "strategy": spec.plan.strategy,
        "compiles": kind_of(step_kind).compiles,
        "resumed_from_step": resumed,
        "job": config_of(spec, parts.order.batch_size, subject),
    }


def too_many_steps(spec: TrainSpec, parts: Parts) -> list[str]:
    """Say that a run will not take as many steps as it was asked for, where that is known before its end."""
    # What a sampler gives may be as many in one epoch as it likes, and asking it ahead would be a call too many.
    each = parts.order.steps(0) if parts.order.digest(0) is None else None
    if spec.steps is None or each is None or each * spec.epochs >= spec.steps:
        return []
    return [
        f"steps={spec.steps} (--steps) will not be reached: {counted(spec.epochs, 'epoch')} of {counted(each, 'step')} "
        f"end the run after {each * spec.epochs:,}; epochs= (--epochs) asks for more"
    ]


def check_schedule(spec: TrainSpec, parts: Parts, schedule: Any) -> None:
    """Raise ``UsageError`` for a ``schedule`` that refuses steps before the run ends, where that is known by now.

    Of torch's own it is OneCycleLR that does. A run that may stop early may end before it comes to that.
    """
    own = schedule.own if isinstance(schedule, Scaled) else schedule
    each = parts.order.steps(0) if parts.order.digest(0) is None else None
    if each is None or spec.early_stop is not None or not isinstance(own, OneCycleLR):
        return
    length = own.total_steps
    steps = each * spec.epochs if spec.steps is None else min(spec.steps, each * spec.epochs)
    if steps <= length:
        return
    epochs = f"epochs={length // each} (--epochs), or " if length % each == 0 else ""
    raise UsageError(
        f"a schedule of {counted(length, 'step')} in all (total_steps) for a run of {steps:,}, which is "
        f"{counted(spec.epochs, 'epoch')} of {counted(each, 'step')}",
        "it has a rate for as many steps as it was made for, and none beyond",
        f"use {epochs}steps={length} (--steps), or make it for {steps:,} steps",
    )


def too_few_steps(spec: TrainSpec, taken: int) -> list[str]:
    """Say that a run that has gone through its epochs took fewer steps than it was asked for."""
    if spec.steps is None or taken >= spec.steps:
        return []
    return [
        f"steps={spec.steps} (--steps) was not reached: {counted(spec.epochs, 'epoch')} ended the run after {taken:,}; "
        "epochs= (--epochs) asks for more"
    ]


def config_of(spec: TrainSpec, batch_size: int, subject: Mapping[str, Any]) -> dict[str, Any]:
    """Return what was asked for, by name, in plain values without a structure: for who compares runs by it.

    Options of the optimizer that differ between its groups are lists. ``subject``: the record's, with ``optimizer``.
    """
    optimizer = subject["optimizer"]
    options: dict[str, Any] = {}
    for name in dict.fromkeys(name for group in optimizer["groups"] for name in group):
        values = [group.get(name) for group in optimizer["groups"]]
        options[f"optimizer_{name}"] = values[0] if all(value == values[0] for value in values) else values
    return {
        "model": spec.job.title,
        "batch_size": batch_size,
        "precision": spec.job.precision,
        "seed": spec.job.seed,
        "ema": spec.job.ema,
        "exactness": spec.plan.exactness,
        "step_kind": spec.plan.step_kind,
        **{name: value for name, value in subject.items() if name != "optimizer"},
        "optimizer": optimizer["name"],
        **options,
    }
