"""A workload that tells a change of the machine from one of what is measured, and numbers to work on."""

from typing import Any

import torch
import torch.distributed as dist

from kway.measuring.timer import Work
from kway.measuring.work import computed

# Of fewer elements than twice these (at::internal::GRAIN_SIZE) torch makes no work for several threads.
IN_ONE_THREAD = 1 << 14


def reference(device: str) -> Work:
    """Return a workload that tells a change of the machine from one of a candidate.

    On a GPU a product that is timed by the GPU itself, and long beside its launch: the CPU has no part in it. On a CPU
    a product of vectors so short that torch does it in the calling thread: how well many threads find together changes
    from one moment to the next on an idle machine, and says nothing of its clock rate or of other programs. The fastest
    third counts: that the thread had to wait once is no change of the machine either.
    """
    if torch.device(device).type == "cpu":
        a, b = (normal(device, torch.float32, IN_ONE_THREAD) for _ in range(2))
        out = torch.empty_like(a)
        return undisturbed(computed(lambda: torch.mul(a, b, out=out), device))
    a, b = (normal(device, torch.float32, 2048, 2048) for _ in range(2))
    out = torch.empty_like(a)
    return computed(lambda: torch.mm(a, b, out=out), device)


def undisturbed(work: Work, parts: int = 3) -> Work:
    """Return work of which the fastest of so many parts stands for all."""

    def run(count: int) -> float:
        each = max(count // parts, 1)
        return count / each * min(work(each) for _ in range(parts))

    return run


def normal(device: str, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Return normally distributed numbers, always the same: how much power products take depends on the numbers."""
    generator = torch.Generator(device).manual_seed(0)
    return torch.randn(*shape, device=device, dtype=torch.float32, generator=generator).to(dtype)


def connected(context: Any) -> None:
    """Let a rank and its device load what they need for an exchange with others."""
    dist.all_reduce(torch.zeros(1, device=context.world.device))
    reference(context.world.device)(1)
