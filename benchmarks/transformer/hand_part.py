"""The same steps by hand, in the ranks that are there: prints a JSON row for each way, as soon as it is known.

    python hand_part.py SIZE:KIND:COMPILED ...
    torchrun --nproc-per-node K hand_part.py --k K SIZE:KIND:COMPILED ...

KIND is one of kway's step kinds. COMPILED says what is compiled together: ``whole``: model and loss as one function;
``apart``: the model, and the loss; ``blocks``: each block of the model, and the loss; ``none``.
"""

import argparse
import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "speed"))

import torch
import torch.distributed as dist
from bars import settled_spread
from by_hand import COMPILED, ByHand
from peak import measure as measure_peak
from peak import wait
from settings import SETTINGS, Setting

from kway.step.kinds import KINDS

WARM_UP, WINDOW, LEAST = 5, 10, 5


@dataclass(frozen=True)
class Way:
    """One way to take the steps."""

    size: str
    kind: str
    compiled: str


def way_of(text: str) -> Way:
    """Read a way. Raises ``ValueError`` for one that names no known size, kind or way to compile."""
    size, kind, compiled = text.split(":")
    if size not in SETTINGS or kind not in KINDS or compiled not in COMPILED:
        raise ValueError(f"{text!r} is not SIZE:KIND:COMPILED")
    return Way(size, kind, compiled)


def windows(step: Callable[[], object], device: torch.device, seconds: float, length: int) -> list[float]:
    """Time windows of ``length`` steps, LEAST of them and ``seconds`` at least. Return the seconds of a step in each.

    Every rank takes as many: the slowest clock decides.
    """
    for _ in range(WARM_UP):
        step()
    found: list[float] = []
    while len(found) < LEAST or sum(found) * length < seconds:
        wait(device)
        barrier()
        begun = time.perf_counter()
        for _ in range(length):
            step()
        wait(device)
        found.append(slowest(time.perf_counter() - begun, device) / length)
    return found


def barrier() -> None:
    """Wait for all ranks."""
    if dist.is_initialized():
        dist.barrier()


def slowest(seconds: float, device: torch.device) -> float:
    """Return the largest of all ranks' times, the same on every rank."""
    if not dist.is_initialized():
        return seconds
    value = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return float(value)


def measure(way: Way, setting: Setting, device: torch.device, seconds: float, length: int) -> dict[str, Any]:
    """Take the steps one way and return the row."""
    if way.compiled != "none":
        torch._dynamo.reset()
    # What a way before this one held, in cycles too.
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    begun = time.perf_counter()
    hand = ByHand(setting, device, way.kind, way.compiled)
    first = hand.step()
    wait(device)
    ready = time.perf_counter() - begun
    first_loss = float(first)
    found = windows(hand.step, device, seconds, length)
    return {
        "kind": "hand",
        "size": way.size,
        "step_kind": way.kind,
        "compiled": way.compiled,
        "step_s": median(found),
        "spread": settled_spread(found),
        "step_s_of_windows": found,
        "flop": setting.flop(hand.count),
        "parameters": hand.count,
        "losses": [first_loss, float(hand.step())],
        "ready_s": ready,
        "peak_memory_bytes": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
    }


def main() -> int:
    """Measure every way; one that fails takes no other with it, but where ranks wait for each other."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ways", nargs="+", type=way_of, metavar="WAY")
    parser.add_argument("--k", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each way at least")
    parser.add_argument("--cpu", action="store_true", help="a smoke run on CPU ranks")
    options = parser.parse_args()
    rank = int(os.environ.get("RANK", "0"))
    device = torch.device("cpu") if options.cpu else torch.device("cuda", rank)
    if not options.cpu:
        torch.cuda.set_device(device)
    if options.k > 1:
        dist.init_process_group("gloo" if options.cpu else "nccl", device_id=None if options.cpu else device)

    def say(**row: Any) -> None:
        if rank == 0:
            print(json.dumps(row), flush=True)

    if not options.cpu:
        say(**measure_peak(device))
        barrier()
    failed = False
    for way in options.ways:
        begun = time.perf_counter()
        try:
            say(**measure(way, SETTINGS[way.size], device, options.seconds, 2 if options.cpu else WINDOW))
        except Exception as error:
            failed = True
            traceback.print_exc()
            say(kind="failed", way=vars(way), reason=f"{type(error).__name__}: {error}"[:2000])
            if options.k > 1:
                break
        print(f"{way}: {time.perf_counter() - begun:.1f} s", file=sys.stderr, flush=True)
    if options.k > 1:
        # Captured collectives may keep a group from being taken down.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(int(failed))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
