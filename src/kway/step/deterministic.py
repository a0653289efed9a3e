"""Algorithms that give the same bits every time, on one thread a shard on CPUs."""

import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch

from kway.devices.cuda import fix_workspace


@contextmanager
def deterministic(device: torch.device, threads: int = 1) -> Iterator[None]:
    """While open, torch uses deterministic algorithms only: an operation that has none raises, by its name.

    On a CPU the number of threads changes bits, so that it is fixed. Everything is restored at the end.
    """
    filling: Any = import_module("torch.utils.deterministic")

    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.backends.cudnn.benchmark,
        filling.fill_uninitialized_memory,
        torch.get_num_threads(),
    )
    if device.type == "cuda":
        fix_workspace()
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    # Fresh memory is always overwritten before it is read here; filling it would only cost time.
    filling.fill_uninitialized_memory = False
    if device.type == "cpu":
        torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.backends.cudnn.benchmark = before[2]
        filling.fill_uninitialized_memory = before[3]
        torch.set_num_threads(before[4])


def bits_hold_within(
    device: torch.device,
    shards: int,
    step_kind: str = "eager",
    threads: int = 1,
    settings: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return what must be the same for two runs at level bits to have equal bits."""
    cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if cuda else platform.machine(),
        "instruction_set": None if cuda else torch.backends.cpu.get_cpu_capability(),
        "torch": str(torch.__version__),
        "cudnn": torch.backends.cudnn.version() if cuda else None,  # type: ignore[no-untyped-call]
        "threads_a_shard": None if cuda else threads,
        "shards": shards,
        "step_kind": step_kind,
        "settings": dict(settings) if settings else None,
    }
