"""The text of progress lines: pure functions from numbers to strings."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from kway.records import Training
from kway.units import seconds_text

GAP = "  "
# What an epoch's record holds beside its metrics.
NOT_METRICS = frozenset(
    {
        "event",
        "earlier",
        "epoch",
        "step",
        "steps",
        "global_step",
        "samples",
        "seconds",
        "samples_per_s",
        "lr",
        "train_loss",
        "validation_loss",
    }
)


def number(value: object) -> float | None:
    """Return ``value`` as a float (records hold NaN and infinities as strings), ``None`` for what is none."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


def metrics(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the validation metrics of an epoch or validation event: its numbers that are nothing else."""
    found = {}
    for name, value in record.items():
        if name not in NOT_METRICS and not name.startswith("train_"):
            read = number(value)
            if read is not None:
                found[name] = read
    return found


def training_metrics(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the training metrics of an epoch, each under ``training NAME``."""
    values = {name: number(value) for name, value in record.items() if name.startswith("train_")}
    return {
        f"training {name.removeprefix('train_')}": value
        for name, value in values.items()
        if value is not None and name != "train_loss"
    }


def last_figures(record: Training) -> str:
    """Format what the last epoch of a run gave: ``epoch 10: loss 0.1035  validation loss 0.1227  accuracy 0.9680``."""
    if not record.epochs:
        return "no epoch"
    row = record.epochs[-1]
    losses = {"loss": number(row.get("train_loss")), "validation loss": number(row.get("validation_loss"))}
    values = {name: value for name, value in losses.items() if value is not None}
    return f"epoch {row['epoch']}: {named(values | (metrics(row) or training_metrics(row)))}"


def time_left(seconds: float) -> str:
    """Format an estimate of the training left: whole seconds, because more digits would only flicker."""
    return f"{seconds_text(max(1, round(seconds)))} of training left" if math.isfinite(seconds) else ""


def rate(samples: float, seconds: float) -> str:
    """Format samples a second: ``12,345 samples/s``; two decimals below 10."""
    if seconds <= 0:
        return "? samples/s"
    value = samples / seconds
    return f"{value:,.0f} samples/s" if value >= 10 else f"{value:.2f} samples/s"


def of(part: int, whole: int | None) -> str:
    """Format ``3/10`` with the part as wide as the whole, so that a redrawn line does not move."""
    return f"{part:>{len(str(whole))}}/{whole}" if whole else str(part)


def fit(fields: Iterable[tuple[int, str]], width: int) -> str:
    """Join fields to one line of at most ``width`` characters.

    A field is (priority, text). Where the line is too long, the field of the highest priority number goes
    first; what is left when only one remains is cut.
    """
    kept = [field for field in fields if field[1]]
    while len(kept) > 1 and len(GAP.join(text for _, text in kept)) > width:
        kept.remove(max(kept, key=lambda field: field[0]))
    return GAP.join(text for _, text in kept)[: max(width, 0)]


def named(values: Mapping[str, float]) -> str:
    """Format metrics as ``accuracy 0.9520``."""
    return GAP.join(f"{name} {value:.4f}" for name, value in values.items())
