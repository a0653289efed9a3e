"""Layouts: text to data and back, and what can be said of one before anything runs."""

from collections.abc import Mapping
from importlib import import_module
from math import prod
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from kway.errors import RefusedError, UsageError
from kway.job import Job, clip_rule
from kway.registry import modules_of, unknown
from kway.step.build import check_factory, check_optimizer
from kway.step.frequencies import refuse_frequencies
from kway.step.gradients import check_gradient_dtypes
from kway.step.hooked import refuse_hooks
from kway.step.losses import check_loss
from kway.step.settings import Settings
from kway.strategies.base import Axis
from kway.strategies.levels import DEFAULT_SHARDS, level_of

SINGLE, AUTO = "single", "auto"
# Axes to come, of which the README speaks, by all names that they will have.
ANNOUNCED = ("shard", "fsdp", "tensor", "pipeline")


def axes() -> dict[str, Axis]:
    """Return every axis by name: each file of this folder that defines an ``AXIS``."""
    found = (import_module(f"kway.strategies.{name}") for name in modules_of("kway.strategies"))
    all_axes = [module.AXIS for module in found if hasattr(module, "AXIS")]
    return {axis.name: axis for axis in sorted(all_axes, key=lambda axis: axis.order)}


def named_sizes(text: str) -> list[tuple[str, int | None]]:
    """Read ``data=2:tensor=2`` as pairs of axis name and size (``None`` where no size is given).

    ``single`` reads as no pair. Raises ``UsageError`` for unknown names, a name given twice, or a bad size.
    """
    text = str(text)  # what is no text is no strategy that is known
    if text.strip() == SINGLE:
        return []
    names = {alias: axis.name for axis in axes().values() for alias in (axis.name, *axis.aliases)}
    pairs: list[tuple[str, int | None]] = []
    for piece in text.strip().split(":"):
        name, equals, count = piece.partition("=")
        if name == AUTO:
            raise UsageError(
                f"strategy {text!r}",
                "a layout is named here, and none is chosen",
                f"use one of {', '.join([SINGLE, *axes()])}, also with a size, data=2",
            )
        if name not in names:
            raise unknown("strategy", name, [*axes(), SINGLE, AUTO], announced=ANNOUNCED)
        if equals and not (count.isdecimal() and int(count) > 0):
            raise UsageError(
                f"strategy {piece!r}", "the size of an axis must be a whole number of at least 1"
            )
        if names[name] in [axis for axis, _ in pairs]:
            raise UsageError(f"strategy {text!r}", f"axis {names[name]!r} is named twice")
        pairs.append((names[name], int(count) if equals else None))
    alone = next((axis for axis, _ in pairs if axes()[axis].one_process), None)
    if alone is not None and len(pairs) > 1:
        raise UsageError(
            f"strategy {text!r}", f"{alone} is one process, and cannot be combined with other axes"
        )
    return pairs


def one_process(layout: Mapping[str, int]) -> bool:
    """Whether the ranks of this layout are threads of one process."""
    known = axes()
    return any(known[axis].one_process and size > 1 for axis, size in layout.items())


def check_step_kind(layout: Mapping[str, int], step_kind: str) -> None:
    """Raise ``RefusedError`` for a step kind that an axis cannot run on several devices."""
    known = axes()
    for axis, size in layout.items():
        kinds = known[axis].kinds
        if size > 1 and kinds is not None and step_kind not in kinds:
            raise RefusedError(
                f"step kind {step_kind} with strategy {title(layout)}",
                known[axis].why_kinds,
                f"use {' or '.join(sorted(kinds))}, or strategy data",
            )


def fit(text: str, devices: int, kind: str = "") -> dict[str, int]:
    """Return the layout that ``text`` means on ``devices`` devices, outermost axis first.

    One axis may be named without a size: it takes what the others leave. ``kind``: the type of the devices, for what is
    advised. Raises ``UsageError`` where the sizes do not multiply to the number of devices.
    """
    pairs = named_sizes(text)
    fixed = prod(size for _, size in pairs if size is not None)
    if [size for _, size in pairs].count(None) > 1:
        raise UsageError(
            f"strategy {text!r}",
            "only one axis may be named without a size",
            "give the others one, like data=2",
        )
    open_size = devices // fixed
    sizes = {axis: size or open_size for axis, size in pairs}
    if prod(sizes.values()) != devices or 0 in sizes.values():
        need = fixed if all(size for _, size in pairs) else f"a multiple of {fixed}"
        raise UsageError(
            f"strategy {text!r} on {devices} device{'s' if devices > 1 else ''}",
            f"it needs {need}",
            # A number alone means GPUs where there are any.
            f"use --devices {'cpu:' if kind == 'cpu' else ''}{fixed}, or name an axis without a size to let it take "
            "all devices",
        )
    known = axes()
    return {axis: sizes[axis] for axis in sorted(sizes, key=lambda axis: -known[axis].order)}


def title(layout: Mapping[str, int]) -> str:
    """Write a layout as users write it."""
    return ":".join(f"{axis}={size}" for axis, size in layout.items()) or SINGLE


# Far more than there are devices for, and the records of so many shards (a figure each, a rank) still fit anywhere;
# not the size of a batch, as the last one may be smaller than the number of shards.
MOST_SHARDS = 65_536


def check_level(layout: Mapping[str, int], level: str, shards: int = DEFAULT_SHARDS) -> None:
    """Raise ``UsageError`` for an unknown level, ``RefusedError`` for one that an axis cannot keep."""
    level_of(level)
    if isinstance(shards, bool) or not isinstance(shards, int) or shards < 1:
        raise UsageError(
            f"shards={shards!r}", "it must be a whole number of at least 1", "leave it out for 8"
        )
    if shards > MOST_SHARDS:
        raise UsageError(
            f"shards={shards}",
            f"at most {MOST_SHARDS}: each is a pass of its own over the model, in every step",
            "as many as the devices that you will ever use are enough",
        )
    known = axes()
    for axis in layout:
        if level not in known[axis].levels:
            keeps = ", ".join(sorted(known[axis].levels))
            raise RefusedError(
                f"{title(layout)} cannot keep exactness {level!r}", f"it keeps {keeps}", "choose one of these"
            )


def check_model(
    job: Job,
    model: nn.Module,
    layout: Mapping[str, int],
    level: str,
    batch_size: int,
    shards: int = DEFAULT_SHARDS,
    trains: bool = True,
    settings: Mapping[str, Any] | None = None,
) -> None:
    """Raise ``RefusedError`` for a model that this layout cannot train at this level.

    ``trains``: whether there will be gradients; without them hooks on parameters stand in nobody's way.
    Raises ``UsageError`` for a loss, an optimizer or a schedule that no layout can use, and for ``settings`` that are
    about parts which the model does not have.
    """
    Settings.of(settings or {}).check_model(model)
    for name, module in model.named_modules():
        kind = type(module).__name__
        if isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel) or "FSDP" in kind:
            raise RefusedError(
                f"{f'module {name!r} of the model' if name else 'the model'} is of type {kind}",
                "kway spreads the plain model by itself",
                "pass the model that it wraps (.module)",
            )
    lazy = next(
        (name for name, value in [*model.named_parameters(), *model.named_buffers()] if is_lazy(value)), None
    )
    if lazy is not None:
        raise RefusedError(
            f"{lazy!r} of the model has no shape yet (a lazy module)",
            "the weights must be there before they are spread",
            "run one batch through the model first, or name the sizes",
        )
    check_loss(job.loss)
    check_factory("optimizer", job.optimizer)
    check_optimizer(job.optimizer)
    if job.schedule is not None:
        check_factory("schedule", job.schedule)
    rule = clip_rule(job.clip)
    complex_one = next((name for name, p in model.named_parameters() if p.is_complex()), None)
    if rule is not None and rule[0] == "value" and complex_one is not None:
        raise RefusedError(
            f"clip={job.clip!r} with the complex parameter {complex_one!r}",
            "complex numbers have no order",
            "clip by norm",
        )
    known = axes()
    shares = prod(size for axis, size in layout.items() if known[axis].splits_batch)
    share = -(-batch_size // shares)
    level_of(level).check(job, model, shares, share, shards)
    if trains and (shares > 1 or level_of(level).shards(shards) is not None):
        check_gradient_dtypes(model)
    if trains:
        cut = level_of(level).cut(job, shares, share, shards)
        refuse_hooks(model, cut, level)
        refuse_frequencies(model, cut, level)
    for axis, size in layout.items():
        reason = known[axis].refuses(job, model, size, level)
        if reason:
            raise RefusedError(f"{axis}={size} cannot keep exactness {level!r} for this model", reason)
