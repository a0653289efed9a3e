"""Learning rates for a batch that grew with the devices: those of one device's batch, times a factor after a warm-up.

Two rules say what k devices with k times the batch make of the rate of one:

``linear``
    k times the rate. k steps of SGD on small batches go about as far as one step on all of them, as long as the
    gradient changes little meanwhile: Goyal et al., "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour",
    arXiv:1706.02677, section 2.1. Where it changes fast, at the beginning, this fails; so the rate rises in equal steps
    from that of one device to k times that (section 2.2; 5 epochs there).
``sqrt``
    sqrt(k) times the rate, which keeps the variance of a step: Krizhevsky, "One weird trick for parallelizing
    convolutional neural networks", arXiv:1404.5997. For Adam and RMSprop it is also what follows from their
    limit of small rates: Malladi et al., "On the SDEs and Scaling Rules for Adaptive Gradient Algorithms",
    arXiv:2205.10287.

Torch's SGD multiplies its momentum with the rate when it steps, so that a rate that changes needs no correction of the
momentum (Goyal et al., section 3).
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from kway.errors import UsageError
from kway.step.build import scheduler_of

RULES: Mapping[str, Callable[[int], float]] = {"linear": float, "sqrt": math.sqrt}
# Of a run that is too short for the five epochs of Goyal et al., a tenth; theirs had 90.
WARMUP_EPOCHS, WARMUP_PART = 5, 0.1


@dataclass(frozen=True)
class LrScale:
    """``rule`` of ``RULES`` for ``devices``; the factor is reached after ``warmup_steps`` optimizer steps.

    ``is_given``: whether the user said how many; else a run that goes on keeps what it began with.
    """

    rule: str
    devices: int
    warmup_steps: int
    is_given: bool = False

    @property
    def factor(self) -> float:
        """What the rate of one device is multiplied with in the end."""
        return RULES[self.rule](self.devices)

    def at(self, taken: int) -> float:
        """Return the multiple of the rate for the step after ``taken`` ones."""
        if taken >= self.warmup_steps:
            return self.factor
        return 1 + (self.factor - 1) * taken / self.warmup_steps


def default_warmup(steps_per_epoch: int | None, total: int) -> int:
    """Return for how many steps a run of ``total`` is warmed up: 5 epochs, or a tenth of the run where that is less."""
    part = math.ceil(WARMUP_PART * total)
    return part if steps_per_epoch is None else min(WARMUP_EPOCHS * steps_per_epoch, part)


@dataclass(frozen=True)
class ScaledSchedule:
    """A job's ``schedule`` (or ``None``) that sees the rates of one device; the optimizer gets them scaled."""

    own: Callable[[Any], Any] | None
    scale: LrScale

    def __call__(self, optimizer: torch.optim.Optimizer) -> "Scaled":
        """Make the job's own scheduler, if it has one, and the one around it. Raises ``UsageError``."""
        return Scaled(optimizer, scheduler_of(self.own, optimizer), self.scale)


def own_schedule(schedule: Any) -> tuple[Any, LrScale | None]:
    """Return a job's schedule without its scale, and the scale, ``None`` where there is none."""
    return (schedule.own, schedule.scale) if isinstance(schedule, ScaledSchedule) else (schedule, None)


class Scaled:
    """A scheduler around ``own``. ``rates``: those of one device, by group of the optimizer, as ``own`` left them."""

    def __init__(self, optimizer: torch.optim.Optimizer, own: Any, scale: LrScale) -> None:
        self.optimizer, self.own, self.scale = optimizer, own, scale
        self.taken = 0
        self.rates: list[float] = []
        with self._unscaled():
            pass

    @property
    def waits(self) -> bool:
        """Whether ``own`` advances by a figure of a validation instead of with every optimizer step."""
        return isinstance(self.own, torch.optim.lr_scheduler.ReduceLROnPlateau)

    def count(self) -> None:
        """Count an optimizer step that was taken."""
        self.taken += 1
        with self._unscaled():
            if self.own is not None and not self.waits:
                self.own.step()

    def step(self, figure: Any) -> None:
        """Hand a figure to ``own``, which waits for it."""
        with self._unscaled():
            self.own.step(figure)

    def state_dict(self) -> dict[str, Any]:
        """Return all that the next step depends on."""
        own = None if self.own is None else self.own.state_dict()
        return {"taken": self.taken, "rates": self.rates, "warmup_steps": self.scale.warmup_steps, "own": own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state``, with the warm-up that it began with. Raises ``UsageError`` where another is given."""
        begun = state["warmup_steps"]
        if self.scale.is_given and self.scale.warmup_steps != begun:
            raise UsageError(
                f"a warm-up of {self.scale.warmup_steps} steps for a run that began with one of {begun}",
                "going on would give a result that neither gives from the start",
                "leave lr_warmup (--lr-warmup) out",
            )
        self.taken, self.scale = state["taken"], replace(self.scale, warmup_steps=begun)
        self.rates = list(state["rates"])
        with self._unscaled():
            if self.own is not None:
                self.own.load_state_dict(state["own"])

    @contextmanager
    def _unscaled(self) -> Iterator[None]:
        """While open, the optimizer has the rates of one device. A group that came later brings its own."""
        groups = self.optimizer.param_groups
        for group, rate in zip(groups, self.rates, strict=False):
            _set(group, rate)
        try:
            yield
        finally:
            self.rates = [float(group["lr"]) for group in groups]
            for group, rate in zip(groups, self.rates, strict=True):
                _set(group, rate * self.scale.at(self.taken))


def advance(schedule: Any) -> None:
    """Let a scheduler count an optimizer step, unless it waits for figures."""
    if isinstance(schedule, Scaled):
        schedule.count()
    elif not waits_for_figure(schedule):
        schedule.step()


def waits_for_figure(schedule: Any) -> bool:
    """Whether a scheduler advances by a figure of a validation instead of with every optimizer step."""
    return (
        schedule.waits
        if isinstance(schedule, Scaled)
        else isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau)
    )


def _set(group: dict[str, Any], rate: float) -> None:
    # A rate that is a tensor stays the one that the optimizer, or a graph, holds.
    if isinstance(group["lr"], torch.Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate
