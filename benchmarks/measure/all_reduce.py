"""A loop of all-reduces as one writes it by hand; run by torchrun: BACKEND BYTES.

Rank 0 prints the seconds of one, of the slowest rank, ten times.
"""

import json
import os
import sys
import time

import torch
import torch.distributed as dist

ROUNDS, QUEUED, WARM = 10, 10, 5


def main(backend: str, size: int) -> None:
    """Time them."""
    rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
    dist.init_process_group(backend)
    tensor = torch.zeros(size // 4, device=device)
    for _ in range(WARM):
        dist.all_reduce(tensor)
    found = []
    for _ in range(ROUNDS):
        if backend == "nccl":
            torch.cuda.synchronize()
        dist.barrier()
        if backend == "nccl":
            torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(QUEUED):
            dist.all_reduce(tensor)
        if backend == "nccl":
            torch.cuda.synchronize()
        took = torch.tensor([(time.perf_counter() - begun) / QUEUED], dtype=torch.float64, device=device)
        dist.all_reduce(took, dist.ReduceOp.MAX)
        found.append(float(took))
    if rank == 0:
        print(json.dumps({"seconds": found}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
