"""One case in the ranks that are there: both candidates in the same processes, interleaved by rounds.

Started by run.py, as one plain process (case ``single``) or by torchrun (case ``data=2``). Rank 0 writes
the timings as JSON to the file that it is given.
"""

import argparse
import json
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from candidates import WORKS, Epoch, Work, barrier, by_hand, slowest, with_kway
from spread import block_spread, quartile_spread


def timed(epoch: Epoch, number: int, steps: int) -> tuple[float, float]:
    """Run one epoch of so many steps. Return the seconds for a step on the slowest rank, and the last batch's loss."""
    barrier()
    begin = time.perf_counter()
    loss = epoch(number)
    return slowest(time.perf_counter() - begin) / steps, float(loss)


def ratios(times: dict[str, list[float]]) -> list[float]:
    """Return kway's time over the hand-written one's, round by round: what drifts in both falls out."""
    return [own / hand for own, hand in zip(times["kway"], times["by hand"], strict=True)]


def measure(
    work: Work, candidates: dict[str, Epoch], max_spread: float, max_seconds: float
) -> dict[str, Any]:
    """Repeat rounds, each candidate once a round and first in every other, until the times have settled."""
    names = list(candidates)
    times: dict[str, list[float]] = {name: [] for name in names}
    losses: dict[str, float] = {}
    begin = time.perf_counter()
    done = 0
    settled = False
    while not settled:
        for name in names if done % 2 else reversed(names):
            seconds, losses[name] = timed(candidates[name], done, work.steps)
            if done >= work.warm_up:
                times[name].append(seconds)
        done += 1
        settled = done - work.warm_up >= work.rounds and block_spread(ratios(times)) <= max_spread
        # Every rank must leave in the same round: the slowest clock decides.
        if slowest(time.perf_counter() - begin) > max_seconds and done > work.warm_up + 5:
            break
    for name, loss in losses.items():
        # A candidate that does not learn has not done the work that its time is for.
        if not loss < work.learnt:
            raise RuntimeError(f"{name} ended at a loss of {loss:.3f}, not below {work.learnt}")
    return {
        "rounds": done - work.warm_up,
        "steps_per_round": work.steps,
        "settled": settled,
        "ratio": median(ratios(times)),
        "ratio_spread": block_spread(ratios(times)),
        "candidates": {
            name: {
                "step_s": median(values),
                "spread": block_spread(values),
                "round_spread": quartile_spread(values),
                "last_loss": losses[name],
                "step_s_of_rounds": values,
            }
            for name, values in times.items()
        },
    }


def main() -> None:
    """Measure and let rank 0 write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--work", choices=WORKS, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--max-spread", type=float, required=True)
    parser.add_argument("--max-seconds", type=float, required=True)
    options = parser.parse_args()
    if options.ranks > 1:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if dist.is_initialized() else 0
    work = WORKS[options.work]
    inputs, labels = work.arrays(work.samples)
    with with_kway(work, inputs, labels) as kway_epoch:
        # After kway has opened, so that both sides have the same number whatever it chose.
        torch.set_num_threads(options.threads)
        hand = by_hand(work, inputs, labels, rank, options.ranks)
        result = measure(work, {"by hand": hand, "kway": kway_epoch}, options.max_spread, options.max_seconds)
    if rank == 0:
        options.file.write_text(json.dumps(result))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
