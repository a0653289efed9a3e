"""Steps of several sittings timed in turns, so that a change of the machine meets all of them alike."""

import math
import time
from collections.abc import Callable, Sequence
from statistics import median, quantiles
from typing import Any

from kway.errors import KwayError, OutOfMemoryError, line_of
from kway.profiling.fitted import line_through
from kway.profiling.scatter import scatter
from kway.profiling.sitting import WINDOW, Reading, Sitting

# Rounds in which each share has a window; steps before the first one, in which happens what happens once.
ROUNDS, LEAST_ROUNDS, MOST_ROUNDS = 7, 3, 15
WARM_UP, WARM_UP_MORE = 4, 2
# Steps that are recorded are recorded after some, once for each shape.
WARM_UP_RECORDED = 8
# Seconds more than planned that a user should hear of.
WORTH_SAYING_S = 2.0

Spot = tuple[Sitting, int]


def time_in_turns(
    sittings: Sequence[Sitting],
    seconds: float,
    parts: bool,
    recorded: bool = False,
    clock: Callable[[], float] = time.perf_counter,
    longer: Callable[[float], None] = lambda rest_s: None,
) -> tuple[list[tuple[Spot, Reading]], list[str]]:
    """Return what each share of each sitting took, and lines on shares that the model cannot compute.

    ``seconds``: about how long all may take; three rounds in any case. ``parts``: whether the parts of a step are told
    apart as well, in windows of their own; ``recorded``: whether steps are recorded. ``longer`` is told how many
    seconds are still to come where the least takes longer than there is time for. Raises what a step over a share of
    the job's own batch raises, but for one that does not fit the device.
    """
    begun = clock()
    spots: dict[Spot, float] = {}
    left = []
    for sitting in sittings:
        for samples in sitting.seat.shares:
            # The first share also pays for what happens once in an engine.
            own = samples == sitting.seat.shares[0]
            try:
                steps = WARM_UP_RECORDED if recorded else WARM_UP if own else WARM_UP_MORE
                step_s = sitting.warm(samples, steps)
            except Exception as error:
                # Of a smaller one than the job has, batch normalisation may not be able to make statistics, say.
                if own and not isinstance(error, OutOfMemoryError):
                    raise
                sitting.leave(samples)
                left.append(f"shares of {samples} samples were left out: {_why(error)}")
                continue
            spots[sitting, samples] = max(step_s, 1e-9)
    rest = max(0.0, seconds - (clock() - begun))
    # A step more to warm the caches, and half as many for the parts.
    there_is_time_for = round((rest / (ROUNDS * (sum(spots.values()) or 1.0)) - 1) / (1.5 if parts else 1.0))
    length = {
        (sitting, samples): max(1, min(WINDOW, there_is_time_for), math.ceil(sitting.lasts / step_s))
        for (sitting, samples), step_s in spots.items()
    }
    least = LEAST_ROUNDS * sum((1 + length[spot] * (2 if parts else 1)) * spots[spot] for spot in spots)
    if least > rest + WORTH_SAYING_S:
        longer(least)
    found = [(spot, Reading()) for spot in spots]
    for number in range(MOST_ROUNDS):
        since = clock()
        for place in range(len(found)):
            # Each round begins with the next one.
            (sitting, samples), reading = found[(place + number) % len(found)]
            sitting.window(samples, length[sitting, samples], reading, parts)
        took = clock() - since
        if number + 1 >= LEAST_ROUNDS and clock() - begun + took > seconds:
            break
    return found, left


def _why(error: Exception) -> str:
    if not isinstance(error, KwayError):
        return line_of(error)
    # Of memory: how much was asked for, and is free; the rest says what lay there by part, or what else to do.
    return ": ".join(text.splitlines()[0] for text in (error.got, error.need) if text)


def timings(step_kind: str, found: Sequence[tuple[Spot, Reading]]) -> list[dict[str, Any]]:
    """Return ``Workload.timings`` of one step kind."""
    rows = []
    for (sitting, samples), reading in found:
        for part, seconds in {"step": reading.step, **reading.parts}.items():
            middle = median(seconds)
            rows.append(
                {
                    "step_kind": step_kind,
                    "threads": sitting.seat.threads,
                    "devices": sitting.seat.devices,
                    "samples": samples,
                    "part": part,
                    "seconds": middle,
                    "spread": _spread(seconds, middle),
                    "step_spread": scatter(reading.single) if part == "step" else None,
                }
            )
    return rows


def _spread(seconds: Sequence[float], middle: float) -> float:
    if len(seconds) < 2 or middle <= 0:
        return 0.0
    low, _, high = quantiles(seconds, n=4, method="inclusive")
    return (high - low) / 2 / middle


def fits(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return ``Workload.fits``: a line through the timings of each (step kind, threads, part, alone or not).

    None where only one share was timed: that does not tell the fixed part from what each sample adds.
    """
    groups: dict[tuple[str, int, bool, str], list[dict[str, Any]]] = {}
    for row in rows:
        key = row["step_kind"], row["threads"], row["devices"] > 1, row["part"]
        groups.setdefault(key, []).append(row)
    found = []
    for (kind, threads, several, part), own in groups.items():
        if len({row["samples"] for row in own}) < 2:
            continue
        fixed, each, error = line_through([row["samples"] for row in own], [row["seconds"] for row in own])
        found.append(
            {
                "step_kind": kind,
                "threads": threads,
                "several": several,
                "part": part,
                "fixed_s": fixed,
                "per_sample_s": each,
                "error": error,
            }
        )
    return found
