"""Claim: with several processes copies must not be ``non_blocking``, or ranks hang.

Trains one model with ``DistributedDataParallel`` on k ranks, once for each way to bring a batch to the device, every
way in processes of its own and with a time limit: what hangs is seen to hang. A batch comes from a DataLoader with
worker processes. After each way all ranks must hold the same weights, and every way the same as the first (``fp64``,
and on GPUs deterministic kernels: there is nothing that could differ).
"""

import argparse
import hashlib
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

WARM = 5


def ways(kind: str) -> list[dict[str, bool]]:
    """List the ways: memory is pinned where there is a GPU to pin it for."""
    pins = (False, True) if kind == "cuda" else (False,)
    return [{"non_blocking": later, "pinned": pinned} for pinned in pins for later in (False, True)]


def rank_main(options: argparse.Namespace) -> None:
    """Train on one rank; print hash and times as JSON."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    device = torch.device(options.kind, rank) if options.kind == "cuda" else torch.device("cpu")
    if options.kind == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if options.kind == "cuda" else "gloo")
    model = (
        nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 26 * 26, 10))
        .to(device)
        .double()
    )
    model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    count = options.batch * (WARM + options.steps)
    images, classes = torch.randn(count, 1, 28, 28, dtype=torch.float64), torch.arange(count) % 10
    data = TensorDataset(images[rank::size], classes[rank::size])
    loader = DataLoader(data, batch_size=options.batch // size, num_workers=2, pin_memory=options.pinned)
    took, begun = [], time.perf_counter()
    for x, y in loader:
        x, y = (part.to(device, non_blocking=options.non_blocking) for part in (x, y))  # noqa: PLW2901
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        if options.kind == "cuda":
            torch.cuda.synchronize()
        took.append(time.perf_counter() - begun)
        begun = time.perf_counter()
    held = hashlib.sha256()
    for parameter in model.parameters():
        held.update(parameter.detach().cpu().numpy().tobytes())
    print(json.dumps({"rank": rank, "sha256": held.hexdigest(), "step_s": took[WARM:]}))
    dist.destroy_process_group()


def free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as asked:
        asked.bind(("127.0.0.1", 0))
        return int(asked.getsockname()[1])


def result_in(output: str) -> dict[str, Any] | None:
    """Return what a rank printed last; ``None`` where that is no result."""
    try:
        row = json.loads(output.splitlines()[-1])
    except (IndexError, ValueError):
        return None
    return row if isinstance(row, dict) and {"sha256", "step_s"} <= row.keys() else None


def try_way(options: argparse.Namespace, way: dict[str, bool]) -> dict[str, Any]:
    """Start the ranks of one way, and say whether they all came to their end, with which weights, in what time.

    Where they did not: ``died``, exit codes by rank of those that ended with another code than 0 or without a result,
    and ``hung``, whether some were still there at the limit though none had died. Who waits for a dead rank does
    not hang by a copy.
    """
    shared = {"WORLD_SIZE": str(options.ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    words = [sys.executable, __file__, "--rank", "--kind", options.kind, "--batch", str(options.batch)]
    words += [
        "--steps",
        str(options.steps),
        *(f"--{name.replace('_', '-')}" for name, on in way.items() if on),
    ]
    fixed = {"OMP_NUM_THREADS": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    ranks = [
        subprocess.Popen(
            words, env=os.environ | shared | fixed | {"RANK": str(rank)}, stdout=subprocess.PIPE, text=True
        )
        for rank in range(options.ranks)
    ]
    begun, rows, died = time.monotonic(), [], {}
    try:
        for number, rank in enumerate(ranks):
            left = max(0.1, options.limit - (time.monotonic() - begun))
            try:
                row = result_in(rank.communicate(timeout=left)[0])
            except subprocess.TimeoutExpired:
                continue
            if row is None or rank.returncode:
                died[str(number)] = rank.returncode
            else:
                rows.append(row)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    if len(rows) < len(ranks):
        after = round(time.monotonic() - begun, 1)
        return way | {"ended": False, "hung": not died, "died": died, "after_s": after}
    steps = [max(each) for each in zip(*(row["step_s"] for row in rows), strict=True)]
    return way | {
        "ended": True,
        "sha256": sorted({row["sha256"] for row in rows}),
        "step_ms": round(1e3 * statistics.median(steps), 2),
    }


def main() -> int:
    """Try every way; return 0 where none hung, no rank died, and all gave the same weights."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--non-blocking", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--pinned", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--kind", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--limit", type=float, default=180.0, help="seconds after which a way is taken to hang"
    )
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.rank:
        rank_main(options)
        return 0
    rows = [try_way(options, way) for _ in range(options.rounds) for way in ways(options.kind)]
    hashes = {digest for row in rows for digest in row.get("sha256", ())}
    record = {
        "kind": options.kind,
        "ranks": options.ranks,
        "rows": rows,
        "hung": sum(row.get("hung", False) for row in rows),
        "died": sum(bool(row.get("died")) for row in rows),
        "hashes": len(hashes),
    }
    print(json.dumps(record, indent=1))
    if options.out:
        options.out.write_text(json.dumps(record, indent=1) + "\n")
    return int(not all(row["ended"] for row in rows) or len(hashes) != 1)


if __name__ == "__main__":
    sys.exit(main())
