"""What a step computes in how long on one device, by its share of the batch: read off what was timed."""

from collections.abc import Sequence
from typing import Any

from kway.cost.curve import between
from kway.cost.skew import QUARTILE
from kway.errors import NotMeasuredError
from kway.workload import Workload

# Of forward and backward together, where nobody could time them apart: backward multiplies twice as often, for the
# gradients of inputs and of weights (Kaplan et al., "Scaling Laws for Neural Language Models", 2020, section 2.1).
BACKWARD = 2 / 3


def compute_s(
    workload: Workload,
    step_kind: str,
    samples: float,
    threads: int | None = None,
    part: str = "step",
    several: bool = False,
) -> float:
    """Return the seconds of ``part`` of a step over ``samples`` samples on one device with ``threads`` CPU threads.

    ``several``: as one of several devices takes it, with all that it does for the others but for what goes between them
    (batch statistics, copies of gradients); where that was not timed, as one alone. Between two measured shares a
    straight line. Beyond them the fitted line's slope, from the last measured point on, and never less than 0; without
    a fit that of the two nearest shares. Of another number of threads than any that was timed: the nearest one's.

    Raises ``NotMeasuredError`` where nothing was timed of this step kind and part, or one share alone which is not
    this one.
    """
    own = _timed(workload, step_kind, part, threads, several)
    points = _points(own)
    if not points:
        left = workload.step_kinds_left.get(step_kind)
        raise NotMeasuredError(
            f"the time of {'a step' if part == 'step' else part}, step kind {step_kind}",
            left or "it was not timed",
            f"time it: kway profile --step-kind {step_kind}",
        )
    if points[0][0] <= samples <= points[-1][0]:
        return between(points, samples)
    end, seconds = points[0] if samples < points[0][0] else points[-1]
    fitted = _fit(workload, step_kind, part, own)
    slope = fitted["per_sample_s"] if fitted else _slope(points, samples, step_kind)
    return float(max(0.0, seconds + slope * (samples - end)))


def fixed_s(
    workload: Workload, step_kind: str, threads: int | None = None, part: str = "step", several: bool = False
) -> float:
    """Return the seconds of a part that do not fall with the share: starting operations, whatever they work on.

    The fitted line at no sample (least squares of relative residuals, as ``kway.measuring.fit``); 0 without one.
    """
    fitted = _fit(workload, step_kind, part, _timed(workload, step_kind, part, threads, several))
    return float(fitted["fixed_s"]) if fitted else 0.0


def line_error(
    workload: Workload, step_kind: str, threads: int | None = None, several: bool = False
) -> float | None:
    """Return the largest relative residual of the line through the times of a step, ``None`` where there is no line."""
    fitted = _fit(workload, step_kind, "step", _timed(workload, step_kind, "step", threads, several))
    return float(fitted["error"]) if fitted else None


def is_timed(workload: Workload, step_kind: str, part: str) -> bool:
    """Whether a part was timed of this step kind."""
    return bool(workload.timed(step_kind, part))


def backward_s(
    workload: Workload, step_kind: str, samples: float, threads: int | None = None, several: bool = False
) -> float:
    """Return the seconds of the backward pass: timed, or a part of the step.

    A recorded step is one piece that runs the kernels of a step that is not recorded, and starts them all at once: the
    part is that of the step it records, where that was timed, of what each sample adds. Else that of the layers, again
    of what each sample adds, and without layers two thirds.
    """
    if is_timed(workload, step_kind, "backward"):
        return compute_s(workload, step_kind, samples, threads, "backward", several)
    step = compute_s(workload, step_kind, samples, threads, several=several)
    return step * _backward_part(workload, RECORDS.get(step_kind, ""), threads, several)


def _backward_part(workload: Workload, like: str, threads: int | None, several: bool) -> float:
    """Return which part of what each sample adds to a step is backward's. ``like``: of this step kind, where timed."""
    lines = [
        _fit(workload, like, part, _timed(workload, like, part, threads, several))
        for part in ("backward", "step")
    ]
    slopes = [line["per_sample_s"] if line else 0.0 for line in lines]
    if min(slopes) > 0:
        return float(min(1.0, slopes[0] / slopes[1]))
    each = {part: sum(layer[part]["per_sample_s"] for layer in workload.layers) for part in _PASSES}
    total = sum(each.values())
    return float(each["backward"] / total) if total > 0 else BACKWARD


_PASSES = ("forward", "backward")
# By kind of step that is recorded: the one that it records.
RECORDS = {"graph": "eager", "compiled-graph": "compiled"}


def line_s(line: dict[str, Any], samples: float) -> float:
    """Return what a line of a layer says of so many samples."""
    return float(line["fixed_s"]) + float(line["per_sample_s"]) * samples


def spread_of(
    workload: Workload, step_kind: str, samples: float, threads: int | None = None, several: bool = False
) -> float:
    """Return the standard deviation of single steps, as a part of a step, where it was timed at the nearest share.

    Where steps were not timed one by one, that of windows of them, by the quartiles of a normal distribution.
    """
    timed = _timed(workload, step_kind, "step", threads, several)
    nearest = min(timed, key=lambda timing: abs(timing["samples"] - samples), default=None)
    if nearest is None:
        return 0.0
    single = nearest["step_spread"]
    return float(nearest["spread"]) / QUARTILE if single is None else float(single)


def timed_shares(
    workload: Workload, step_kind: str, threads: int | None = None, several: bool = False
) -> list[int]:
    """Return the shares, smallest first, between which ``compute_s`` reads a step; beyond them it goes on by a line."""
    return sorted({timing["samples"] for timing in _timed(workload, step_kind, "step", threads, several)})


def _timed(
    workload: Workload, step_kind: str, part: str, threads: int | None, several: bool
) -> list[dict[str, Any]]:
    """Return the timings that say most of a rank with ``threads`` threads, one of ``several`` or alone.

    Whether it is one of several counts first, the number of threads second: the smaller of two that are as near.
    """
    timed = workload.timed(step_kind, part, several=several) or workload.timed(step_kind, part)
    known = sorted({timing["threads"] for timing in timed})
    if not known:
        return []
    wanted = known[-1] if threads is None else threads
    nearest = min(known, key=lambda count: (abs(count - wanted), count))
    return [timing for timing in timed if timing["threads"] == nearest]


def _fit(
    workload: Workload, step_kind: str, part: str, timed: Sequence[dict[str, Any]]
) -> dict[str, Any] | None:
    """Return the line through these timings; ``None`` where they are of one share, which tells no part from another."""
    if len({timing["samples"] for timing in timed}) < 2:
        return None
    return workload.fit(step_kind, part, timed[0]["threads"], timed[0]["devices"] > 1)


def _points(timed: Sequence[dict[str, Any]]) -> list[tuple[float, float]]:
    found: dict[float, list[float]] = {}
    for timing in timed:
        found.setdefault(timing["samples"], []).append(timing["seconds"])
    return sorted((samples, sum(each) / len(each)) for samples, each in found.items())


def _slope(points: Sequence[tuple[float, float]], samples: float, step_kind: str) -> float:
    if len(points) < 2:
        raise NotMeasuredError(
            f"the time of a step over {samples:g} samples, step kind {step_kind}",
            f"only a share of {points[0][0]:g} was timed, which does not tell the fixed part from the rest",
            "profile again with the numbers of devices that are asked for",
        )
    (low, before), (high, after) = points[:2] if samples < points[0][0] else points[-2:]
    return (after - before) / (high - low)
