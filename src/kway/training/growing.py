"""A global batch that grows with the devices, and what the learning rate does then: nothing, unless it is asked to."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from kway.data.order import Order
from kway.errors import UsageError
from kway.job import Job
from kway.registry import known
from kway.step.scaling import RULES, LrScale, Scaled, ScaledSchedule, default_warmup
from kway.training.spec import Interval, TrainSpec, interval, positive
from kway.units import counted, shown

NO_WARMUP = Interval(0, "steps")


@dataclass(frozen=True)
class Growth:
    """``per_device`` samples a device. ``rule``: how rates are scaled, if at all. ``warmup``: ``None`` for as usual."""

    per_device: int
    rule: str | None
    warmup: Interval | None

    def of(self, job: Job, devices: int) -> Job:
        """Return the job with the global batch of so many devices."""
        return replace(job, batch_size=self.per_device * devices)

    def replaced(self, job: Job, devices: int) -> list[str]:
        """Say which batch of the job's own does not count, where it has one."""
        own = job.batch_size if job.batch_size is not None else getattr(job.data, "batch_size", None)
        if own in (None, self.per_device * devices):
            return []
        return [
            f"batch_size_per_device={self.per_device} counts, and not the job's own batch size of {own:,}"
        ]

    def over(self, spec: TrainSpec, order: Order) -> TrainSpec:
        """Return the run over ``order`` with its rates scaled, where they are to be.

        Raises ``UsageError`` where the warm-up is said in epochs, or left open, and their length is not known.
        """
        if self.rule is None:
            return replace(spec, per_device=self.per_device)
        devices, job = spec.plan.devices, spec.job
        count = self._warmup_steps(order.steps(0), spec.epochs, spec.steps)
        scale = LrScale(self.rule, devices, count, is_given=self.warmup is not None)
        if devices > 1:  # on one there is nothing to scale
            job = replace(job, schedule=ScaledSchedule(job.schedule, scale))
        return replace(spec, job=job, per_device=self.per_device, lr_scale=scale)

    def _warmup_steps(self, per_epoch: int | None, epochs: int, steps: int | None) -> int:
        given = self.warmup
        if given is not None and given.unit == "steps":
            return given.count
        if given is not None and per_epoch is not None:
            return given.count * per_epoch
        lengths = [steps, None if per_epoch is None else per_epoch * epochs]
        known_ones = [length for length in lengths if length is not None]
        if given is not None or not known_ones:
            raise UsageError(
                "lr_scale over a stream that does not say how long it is",
                "the length of its warm-up is counted in epochs",
                'say it in steps: lr_warmup="200steps" (--lr-warmup 200steps)',
            )
        return default_warmup(per_epoch, min(known_ones))


def growth_of(per_device: Any, rule: Any, warmup: Any, planned: bool = False) -> Growth | None:
    """Read ``batch_size_per_device``, ``lr_scale`` and ``lr_warmup``; ``None`` where none is given.

    ``planned``: whether a plan is to choose the number of devices. Raises ``UsageError``.
    """
    if rule is None and warmup is not None:
        raise UsageError(
            f"lr_warmup={shown(warmup)} without lr_scale",
            "the rates are those of the job, from the first step on",
            'name a rule: lr_scale="linear" (--lr-scale linear), or give the job a schedule that warms up',
        )
    if rule is not None:
        known("lr_scale", rule, RULES)
    if per_device is None:
        if rule is not None:
            raise UsageError(
                f"lr_scale={rule!r} without batch_size_per_device",
                "the global batch is the same on any number of devices, and so is the learning rate that suits it",
                "say how many samples a device gets: batch_size_per_device= (--batch-size-per-device)",
            )
        return None
    positive("batch_size_per_device", per_device)
    if planned:
        raise UsageError(
            "batch_size_per_device with a plan",
            "the number of devices is what a plan chooses",
            "call kway.plan(job, batch_size_per_device=N), then kway.train(job, plan=...): kway plan "
            "--batch-size-per-device N, then kway train --plan plan.json",
        )
    return Growth(per_device, rule, None if warmup is None else _warmup(warmup))


def _warmup(value: Any) -> Interval:
    text = str(value).strip()
    if not isinstance(value, bool) and text in ("0", "0steps", "0epochs"):
        return NO_WARMUP
    try:
        return interval("lr_warmup", value)
    except UsageError as error:
        raise UsageError(error.got, 'it must be a number of epochs, or like "200steps"; 0 for none') from None


def scale_of(spec: TrainSpec, schedule: Any) -> LrScale | None:
    """Return the scale in force. ``schedule``: the run's scheduler, which may have gone on with another warm-up."""
    return schedule.scale if isinstance(schedule, Scaled) else spec.lr_scale


def scale_facts(spec: TrainSpec, schedule: Any) -> dict[str, Any] | None:
    """Return what a record says of it: see ``kway.records.Training``."""
    scale = scale_of(spec, schedule)
    if scale is None:
        return None
    return {
        "rule": scale.rule,
        "devices": scale.devices,
        "batch_size_per_device": spec.per_device,
        "factor": scale.factor,
        "warmup_steps": scale.warmup_steps,
    }


def growth_lines(spec: TrainSpec, optimizer: Any, schedule: Any) -> list[str]:
    """Say what becomes of the learning rate of one device's batch, and what could."""
    per_device, scale = spec.per_device, scale_of(spec, schedule)
    if per_device is None:
        return []
    # As it began: a run that lost a device keeps its batch.
    devices = spec.facts["batch_size"] // per_device
    if devices == 1:
        return []
    now = (
        schedule.rates if isinstance(schedule, Scaled) else [group["lr"] for group in optimizer.param_groups]
    )
    # Where a schedule begins below it, the rate that it is of.
    rates = [group.get("initial_lr", rate) for group, rate in zip(optimizer.param_groups, now, strict=True)]
    batch = f"the global batch is {devices} x {per_device} = {devices * per_device:,}"
    if scale is None:
        usual = " and ".join(f"{_texts(rates, rule(devices))} ({name})" for name, rule in RULES.items())
        return [
            f"{batch}, and the learning rate stays {_texts(rates, 1)}: usual against one device would be {usual}, with "
            "lr_scale= (--lr-scale)"
        ]
    warm = f", after a warm-up of {counted(scale.warmup_steps, 'step')} from {_texts(rates, 1)}"
    made = f"{scale.rule} scaling makes the learning rate {_texts(rates, scale.factor)}"
    return [f"{batch}; {made}{warm if scale.warmup_steps else ''}"]


def _texts(rates: Sequence[Any], factor: float) -> str:
    found = list(dict.fromkeys(float(rate) for rate in rates))
    return ", ".join(f"{rate * factor:.4g}" for rate in found[:3]) + ", ..." * (len(found) > 3)
