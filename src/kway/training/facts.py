"""What a checkpoint says about the job that wrote it, so that another job does not go on from it unnoticed."""

import zlib
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from kway.checkpoints.names import own_parameters
from kway.checkpoints.reading import Checkpoint
from kway.data.parts import Parts
from kway.errors import RefusedError, UsageError
from kway.flat import flat
from kway.job import Job, clip_rule
from kway.records import Plan
from kway.step.scaling import own_schedule
from kway.units import counted


def facts_of(job: Job, parts: Parts, plan: Plan, model: nn.Module) -> dict[str, Any]:
    """Return what decides which numbers a run computes, as plain values, whatever the number of devices.

    ``model``: as it was built, without kway's changes.
    """
    rule = clip_rule(job.clip)
    schedule, scale = own_schedule(job.schedule)
    return {
        "batch_size": parts.order.batch_size,
        "samples": parts.order.samples,
        "shuffle": job.shuffle,
        "seed": job.seed,
        "precision": job.precision,
        "loss": named(job.loss),
        "penalty": named(job.penalty),
        "schedule": named(schedule),
        "lr_scale": None if scale is None else f"{scale.rule} x {scale.factor:g}",
        "clip": None if rule is None else f"{rule[0]} {rule[1]:g}",
        "ema": job.ema,
        "frozen": [name for name, value in own_parameters(model).items() if not value.requires_grad],
        "shards": plan.shards if plan.exactness == "bits" else None,
    }


def check_parts(checkpoint: Checkpoint) -> None:
    """Raise ``UsageError`` where the state around the engine is not of the kind that kway writes."""
    for name, kind in {"job": dict, "run": dict, "options": list, "plan": dict}.items():
        found = checkpoint.part(name)
        if not isinstance(found, kind):
            raise UsageError(
                f"the part {name!r} of checkpoint {checkpoint.path} is {as_text(found)[:40]}",
                "kway writes none like it",
                "go on from another checkpoint",
            )


def differing(checkpoint: Checkpoint, now: Mapping[str, Any]) -> list[str]:
    """List what differs between the job of a checkpoint and the one at hand: see ``facts_of``."""
    then = checkpoint.part("job")
    # Shards decide only where both runs hold bits.
    both = None not in (then.get("shards"), now.get("shards"))
    differ = [
        f"{name} {as_text(then.get(name))}, now {as_text(now.get(name))}"
        for name in {**then, **now}
        if then.get(name) != now.get(name)
        and name not in ("frozen", "noted", "code")
        and (name != "shards" or both)
    ]
    before, after = then.get("frozen", now["frozen"]), now["frozen"]
    for names, said in ((set(after) - set(before), "newly"), (set(before) - set(after), "no longer")):
        if names:
            differ.append(f"{said} frozen: {_some(sorted(names))}")
    return differ


def check_length(checkpoint: Checkpoint, epochs: int, steps: int | None) -> None:
    """Raise ``UsageError`` where a run would end before the step of the checkpoint that it goes on from."""
    run = checkpoint.part("run")
    if "rows" not in run:
        raise UsageError(
            f"checkpoint {checkpoint.path} is of a loop of the user's own",
            "what kway's loop would go on with is not in it",
            "go on with p.resume, or start a new run from its weights (init=, --init)",
        )
    begun = checkpoint.epoch + (run["course"] is not None)
    if (steps is not None and steps < checkpoint.step) or epochs < begun:
        asked = counted(epochs, "epoch")
        if steps is not None:
            asked += f" and {counted(steps, 'step')} at most"
        raise UsageError(
            f"checkpoint {checkpoint.path} is at step {checkpoint.step}, in epoch {begun}",
            f"the run is to take {asked}",
            "ask for more, or go on from an earlier checkpoint",
        )


def check_within(checkpoint: Checkpoint, now: Mapping[str, Any] | None) -> None:
    """Raise ``RefusedError`` where a run at level bits would go on where its bits do not hold."""
    then = checkpoint.part("within")
    if then is None or now is None:
        return
    differ = [
        f"{k} {as_text(then.get(k))}, now {as_text(now.get(k))}" for k in now if then.get(k) != now.get(k)
    ]
    if differ:
        raise RefusedError(
            f"checkpoint {checkpoint.path} holds bits within other conditions: {'; '.join(differ)}",
            "the run would not end with the bits of one that was never stopped",
            "go on under the same conditions, or with exactness='math' (--exactness math)",
        )


def resumed_notices(checkpoint: Checkpoint, streams: bool) -> list[str]:
    """Say where a run goes on from. What its first step shows is in ``other_masks``."""
    again = "the stream was read again from the start of its epoch, up to where the run goes on"
    return [f"resumed from step {checkpoint.step} ({checkpoint.path})", *([again] if streams else [])]


def earlier_ways(checkpoint: Checkpoint, plan: Plan) -> list[str]:
    """Say what of the way in which a run goes on was another one before: true of all that goes on from there, too."""
    before, notices = checkpoint.part("plan"), []
    if plan.exactness != before["exactness"]:
        notices.append(f"up to step {checkpoint.step} the run was at exactness {before['exactness']}")
    kind = before.get("step_kind", "eager")
    if plan.step_kind != kind:
        notices.append(f"up to step {checkpoint.step} the step kind was {kind}")
    return notices


def other_masks(checkpoint: Checkpoint, plan: Plan) -> list[str]:
    """Say what another number of devices changes for a model that draws random numbers, or nothing."""
    before = checkpoint.part("plan")["devices"]
    if plan.exactness == "bits" or plan.devices == before:
        return []
    devices = counted(plan.devices, "device")
    return [
        f"random numbers of the model (dropout) follow seed, step and rank: on {devices} instead of {before} "
        "other masks are drawn"
    ]


def digest(value: torch.Tensor) -> str:
    """Return a short checksum of a tensor's bytes."""
    return f"{zlib.crc32(flat(value.cpu()).view(torch.uint8).numpy().tobytes()):08x}"


def named(value: Any) -> str | None:
    """Name a function or module with its settings, as far as they are plain values or tensors."""
    if value is None:
        return None
    if isinstance(value, nn.Module):
        held = {name: getattr(value, name) for name in [*vars(value), *value._buffers] if name[0] != "_"}
        return f"{type(value).__name__}({_settings(held)})"
    if isinstance(value, partial):
        return f"{named(value.func)}({_settings(dict(enumerate(value.args)) | value.keywords)})"
    return str(getattr(value, "__name__", type(value).__name__))


def _settings(values: Mapping[Any, Any]) -> str:
    shown = {name: _plain(value) for name, value in values.items() if name != "training"}
    return ", ".join(f"{name}={text}" for name, text in shown.items() if text is not None)


def _plain(value: Any) -> str | None:
    if isinstance(value, torch.Tensor):
        return f"tensor {digest(value)}"
    return str(value) if isinstance(value, bool | int | float | str) else None


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def as_text(value: Any) -> str:
    """Write a value that a checkpoint may lack."""
    return "none" if value is None else str(value)
