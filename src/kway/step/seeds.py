"""Random state by arithmetic: what a step draws depends on (seed, step, rank), never on what came before."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from kway.data import generators


def seed_generators(key: int, device: torch.device) -> None:
    """Seed the generators of torch (CPU and ``device``), numpy and Python from a 63-bit key."""
    generators.seed_generators(key)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(key)


@contextmanager
def preserved(device: torch.device) -> Iterator[None]:
    """Give the caller's process its own random state back at the end."""
    on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    with generators.preserved():
        yield
    if on_device is not None:
        torch.cuda.set_rng_state(on_device, device)
