"""Exactness levels: what each promises, what it refuses, and which step keeps it."""

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import nn

from kway.errors import RefusedError
from kway.job import Job
from kway.registry import known
from kway.step.batchnorm import layers, several_values
from kway.step.core import StepCore
from kway.step.deterministic import deterministic
from kway.step.pooled import per_shard
from kway.step.shards import ShardStep
from kway.step.share import ShareStep
from kway.strategies.base import Part

DEFAULT_SHARDS = 8


class Level(ABC):
    """One exactness level. ``global_statistics``: whether batch normalisation sees the global batch."""

    name: ClassVar[str]
    promise: ClassVar[str]
    global_statistics: ClassVar[bool] = False

    def shards(self, asked: int) -> int | None:
        """Return the number of fixed micro-shards of a batch, or ``None`` where shares follow the devices."""
        return None

    def check(self, job: Job, model: nn.Module, devices: int, share: int, shards: int) -> None:  # noqa: B027
        """Raise ``RefusedError`` where this level cannot be kept. ``share``: the most samples of a device."""

    def cut(self, job: Job, devices: int, share: int, shards: int) -> str | None:
        """Say how a batch is cut where no gradient of a part may be changed by itself, else return ``None``."""
        return None

    @abstractmethod
    def open(self, part: Part, optimizer: torch.optim.Optimizer) -> StepCore:
        """Make the step that keeps this level on one rank."""


class _Share(Level):
    keeps_buffers: ClassVar[bool] = False

    def open(self, part: Part, optimizer: torch.optim.Optimizer) -> StepCore:
        """Make a step over the rank's share."""
        return ShareStep(
            part.job,
            part.model,
            optimizer,
            part.device,
            presence=part.presence,
            group=part.batch_group,
            place=part.place,
            ranks=part.shares,
            reducer=part.reducer,
            keeps_buffers=self.keeps_buffers,
            telling=part.telling,
        )


class Math(_Share):
    """The mathematics of one device."""

    name = "math"
    promise = "the mathematics of one device on the whole batch: only rounding differs"
    global_statistics = True
    keeps_buffers = True

    def check(self, job: Job, model: nn.Module, devices: int, share: int, shards: int) -> None:
        """Refuse batch normalisation over a batch that is cut in time."""
        found = layers(model)
        if job.micro_batch is not None and job.micro_batch < share and found:
            raise RefusedError(
                f"micro_batch={job.micro_batch} with batch normalisation (layer {found[0][0]!r}) and shares of up "
                f"to {share} samples",
                "the statistics of the global batch cannot be had from a batch that is cut in time (level math)",
                f"use micro_batch={share} or more, more devices, or exactness loose",
            )

    def cut(self, job: Job, devices: int, share: int, shards: int) -> str | None:
        """Name the devices, or the micro-batches of one."""
        if devices > 1:
            return f"over {devices} devices"
        in_time = job.micro_batch is not None and job.micro_batch < share
        return f"by micro_batch={job.micro_batch}" if in_time else None

    def open(self, part: Part, optimizer: torch.optim.Optimizer) -> StepCore:
        """Make a step over the rank's share, whole where a layer normalises the batch."""
        part.presence.whole = bool(layers(part.model))
        return super().open(part, optimizer)


class Loose(_Share):
    """As math, without a say over batch normalisation."""

    name = "loose"
    promise = "as math, but batch normalisation uses each device's own statistics"

    def check(self, job: Job, model: nn.Module, devices: int, share: int, shards: int) -> None:
        """Refuse layers with collectives of their own over shares cut in time: an empty cut would join none."""
        found = next((n for n, module in model.named_modules() if isinstance(module, nn.SyncBatchNorm)), None)
        if found is not None and devices > 1 and job.micro_batch is not None and job.micro_batch < share:
            raise RefusedError(
                f"micro_batch={job.micro_batch} with SyncBatchNorm (layer {found!r}) and shares of up to "
                f"{share} samples",
                "its collectives would not meet where a device has fewer micro-batches than another (level loose)",
                f"use micro_batch={share} or more, or BatchNorm in its place",
            )

    def open(self, part: Part, optimizer: torch.optim.Optimizer) -> StepCore:
        """Make a step over the rank's share, and look out for shares that are too small to normalise."""
        part.opened.enter_context(several_values(part.model, part.place, part.shares, part.presence))
        return super().open(part, optimizer)


class Bits(Level):
    """The same bits on any number of devices."""

    name = "bits"
    promise = "equal bits on any number of devices up to the number of shards"

    def shards(self, asked: int) -> int | None:
        """Return the fixed number."""
        return asked

    def check(self, job: Job, model: nn.Module, devices: int, share: int, shards: int) -> None:
        """Refuse more devices than shards, and micro-batches of another kind."""
        if devices > shards:
            raise RefusedError(
                f"{devices} devices at exactness bits with {shards} shards",
                "a device needs a shard to compute",
                f"use --shards {devices} or more, or fewer devices",
            )
        if job.micro_batch is not None:
            raise RefusedError(
                f"micro_batch={job.micro_batch} at exactness bits",
                "the shards are the micro-batches",
                "leave it out, and choose --shards so that a shard fits the device",
            )

    def cut(self, job: Job, devices: int, share: int, shards: int) -> str | None:
        """Name the shards."""
        return f"into {shards} shards" if shards > 1 else None

    def open(self, part: Part, optimizer: torch.optim.Optimizer) -> StepCore:
        """Make a step over fixed shards, with deterministic algorithms."""
        part.opened.enter_context(deterministic(part.device))
        statistics = part.opened.enter_context(per_shard(part.model, part.shards, part.device, part.presence))
        return ShardStep(
            part.job,
            part.model,
            optimizer,
            part.device,
            presence=part.presence,
            group=part.batch_group,
            shards=part.shards,
            statistics=statistics,
            telling=part.telling,
        )


LEVELS: dict[str, Level] = {level.name: level for level in (Math(), Loose(), Bits())}


def level_of(name: str) -> Level:
    """Return a level by name. Raises ``UsageError``."""
    return known("exactness level", name, LEVELS)
