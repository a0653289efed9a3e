"""What a run says of itself when it begins."""

from collections.abc import Mapping
from typing import Any

from kway.data.parts import Parts
from kway.training.spec import TrainSpec


def start_of(
    spec: TrainSpec, parts: Parts, steps: int | None, resumed: int | None, subject: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the event ``start``. ``steps`` of the first epoch, ``resumed``: those taken before, where they are known.

    ``subject``: the record's, with ``optimizer``.
    """
    return {
        "event": "start",
        "epochs": spec.epochs,
        "steps_per_epoch": steps,
        "stops_after": spec.steps,
        "samples": parts.order.samples,
        "devices": spec.plan.devices,
        "strategy": spec.plan.strategy,
        "resumed_from_step": resumed,
        "job": config_of(spec, parts.order.batch_size, subject),
    }


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
