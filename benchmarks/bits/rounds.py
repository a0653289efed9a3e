"""Interleaved rounds: every candidate once a round, in changing order, on ranks that start together."""

import math
import time
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from candidates import Candidate, kernels

from kway.comm.group import Group

WARM_UP_STEPS = 5
MIN_ROUNDS = 15
BLOCKS = 5
ROUND_S = 0.25


def synchronise(candidate: Candidate, group: Group) -> None:
    """Wait for this rank's device, then for all ranks."""
    if candidate.engine.device.type == "cuda":
        torch.cuda.synchronize(candidate.engine.device)
    group.barrier()


def timed(candidate: Candidate, steps: int, group: Group) -> float:
    """Return the seconds a step of the slowest rank."""
    with kernels(candidate.setting):
        synchronise(candidate, group)
        begin = time.perf_counter()
        loss = candidate.run(steps)
        if loss.is_cuda:
            torch.cuda.synchronize(loss.device)
        seconds = time.perf_counter() - begin
    if not math.isfinite(float(loss)):
        # A candidate that computes nothing of use has not done the work that its time is for.
        raise RuntimeError(f"{candidate.setting.name} ended at a loss of {float(loss)}")
    return max(group.objects(seconds)) / steps


def spread(values: list[float]) -> float:
    """Return (max - min) / median over the medians of consecutive blocks: a drift shows, an outlier does not."""
    if len(values) < BLOCKS:
        return math.inf
    edges = [index * len(values) // BLOCKS for index in range(BLOCKS + 1)]
    medians = [median(values[start:stop]) for start, stop in pairwise(edges)]
    return (max(medians) - min(medians)) / median(medians)


def ratios(own: list[float], base: list[float]) -> list[float]:
    """Return one time by the other, round by round: what drifts in both falls out."""
    return [a / b for a, b in zip(own, base, strict=True)]


def measure(
    candidates: list[Candidate], group: Group, max_spread: float, max_seconds: float
) -> dict[str, Any]:
    """Time all candidates until every ratio to the first one has settled, for ``max_seconds`` at most.

    Each takes WARM_UP_STEPS first, after which its weights are fingerprinted: equal work gives equal bits.
    """
    begin = time.perf_counter()
    prints = {}
    for candidate in candidates:
        timed(candidate, WARM_UP_STEPS, group)
        prints[candidate.setting.name] = candidate.weights_sha256()
    steps = max(1, min(50, math.ceil(ROUND_S / timed(candidates[0], WARM_UP_STEPS, group))))
    times: dict[str, list[float]] = {candidate.setting.name: [] for candidate in candidates}
    base = times[candidates[0].setting.name]
    settled, late, done = False, False, 0
    while not settled and not late:
        for candidate in candidates if done % 2 else reversed(candidates):
            times[candidate.setting.name].append(timed(candidate, steps, group))
        done += 1
        widest = max(spread(ratios(values, base)) for values in times.values())
        settled = done >= MIN_ROUNDS and widest <= max_spread
        # Every rank must leave in the same round: the slowest clock decides.
        late = max(group.objects(time.perf_counter() - begin)) > max_seconds and done >= BLOCKS
    return {
        "rounds": done,
        "steps_a_round": steps,
        "settled": settled,
        "baseline": candidates[0].setting.name,
        "candidates": {
            name: {
                "step_s": median(values),
                "fastest_step_s": min(values),
                "spread": spread(values),
                "ratio": median(ratios(values, base)),
                "ratio_spread": spread(ratios(values, base)),
                "shards": next(c.setting.shards for c in candidates if c.setting.name == name),
                "weights_sha256": prints[name],
                "step_s_of_rounds": values,
            }
            for name, values in times.items()
        },
    }
