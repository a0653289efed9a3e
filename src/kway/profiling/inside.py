"""What goes on inside a step of one device: operations, bytes that stay, and time, by layer."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from torch import nn

from kway.profiling.bound import Rates, bound_of
from kway.profiling.counted import Counter, Counts
from kway.profiling.fitted import line_through
from kway.profiling.layers import LOSS, Layers, Timer
from kway.profiling.sitting import Sitting
from kway.profiling.sizes import bytes_of, sample_bytes

PASSES = ("forward", "backward")
# Steps of each share that are looked into.
LEAST, MOST = 3, 30


@dataclass(frozen=True)
class Inside:
    """``counts`` by samples of the share; ``taken``: seconds by (part, layer), by samples, a row a step."""

    counts: dict[int, Counts]
    taken: dict[int, list[dict[tuple[str, str], float]]]
    sample_bytes: int


def counts_of(sitting: Sitting, samples: int) -> tuple[Counts, int]:
    """Take a step over ``samples``; return what it computed and kept, and the bytes of a sample."""
    share = sitting.share(samples)
    counter = Counter(sitting.engine.model, share)
    _step(sitting, share, counter.around)
    counts = counter.counts
    if counts.uncounted:
        again = Counter(sitting.engine.model, share, unfused=True)
        _step(sitting, share, again.around)
        counts.flop, counts.uncounted = again.counts.flop, again.counts.uncounted
    return counts, sample_bytes([batch for batch, _ in share.micro], share.count)


def look_inside(sitting: Sitting, seconds: float) -> Inside:
    """Count a step of each share, and time the layers of some more. ``seconds``: about how long all may take."""
    begun, shares = time.perf_counter(), sitting.shares
    found = {samples: counts_of(sitting, samples) for samples in shares}
    timer = Timer(sitting.marks.now, sitting.marks.between)
    timer.layers = Layers(sitting.engine.model, timer.turn)
    taken: dict[int, list[dict[tuple[str, str], float]]] = {samples: [] for samples in shares}
    for number in range(1 + MOST):
        since = time.perf_counter()
        for samples in shares:
            _step(sitting, sitting.share(samples), timer.layers.around)
            sitting.marks.wait()
            row = timer.take()
            if number:
                # The first step pays for what happens once.
                taken[samples].append(row)
        now = time.perf_counter()
        if number >= LEAST and 2 * now - since - begun > seconds:
            break
    bytes_ = max(each for _, each in found.values())
    return Inside({samples: counts for samples, (counts, _) in found.items()}, taken, bytes_)


def _step(sitting: Sitting, share: Any, around: Any) -> None:
    sitting.phases.around = around
    try:
        sitting.engine.step(share, sitting.step, sitting.engine.tally([*sitting.engine.job.metrics]))
        sitting.step += 1
    finally:
        sitting.phases.around = None


def kept_line(counts: dict[int, Counts], own: int) -> tuple[float, float]:
    """Return (fixed, per sample) bytes that stay for backward. ``own``: of a sample itself, which stays as well."""
    sizes = sorted(counts)
    fixed, each = _exact(sizes, [sum(counts[samples].kept.values()) for samples in sizes])
    return fixed, each + own


def _exact(samples: Sequence[int], values: Sequence[float]) -> tuple[float, float]:
    """Return the line through the smallest and the largest size: what is counted is known exactly."""
    if len(samples) < 2:
        return 0.0, values[0] / samples[0]
    each = max(0.0, (values[-1] - values[0]) / (samples[-1] - samples[0]))
    return max(0.0, values[-1] - each * samples[-1]), each


def rows(model: nn.Module, inside: Inside, rates: Rates) -> list[dict[str, Any]]:
    """Return ``Workload.layers``, in the order in which the model holds them: those that ran, or hold parameters."""
    sizes = sorted(inside.counts)
    most = inside.counts[sizes[-1]]
    ran = {name for steps in inside.taken.values() for row in steps for _, name in row}
    named = [*Layers(model, lambda name: None).names.items(), (LOSS, None)]
    found = []
    for name, module in named:
        own = [] if module is None else list(module.parameters(recurse=False))
        if name not in ran and not own:
            continue
        lines, fixed_s, all_s = {}, 0.0, 0.0
        for part in PASSES:
            times = [median(row.get((part, name), 0.0) for row in inside.taken[each]) for each in sizes]
            fixed, each, _ = line_through(sizes, times)
            lines[part] = {"fixed_s": fixed, "per_sample_s": each}
            fixed_s += fixed
            all_s += fixed + each * sizes[-1]
        kept = _exact(sizes, [inside.counts[each].kept.get(name, 0) for each in sizes])[1]
        flop, weights = most.flop.get(name, 0.0), bytes_of(own)
        # Forward reads what comes in and the weights and writes what goes out; backward reads these again and the
        # gradient of what went out, and writes gradients of the others: three times as much in all.
        moved = 3.0 * (most.moved.get(name, 0) + weights)
        bound, why = bound_of(all_s, fixed_s, flop, moved, rates)
        found.append(
            {
                "name": name,
                "type": "loss" if module is None else type(module).__name__,
                "parameters": sum(parameter.numel() for parameter in own),
                "parameter_bytes": weights,
                "flop_per_sample": None if most.uncounted else flop / sizes[-1],
                "activation_bytes_per_sample": kept,
                "forward": lines["forward"],
                "backward": lines["backward"],
                "bound": bound,
                "why": why,
            }
        )
    return found
