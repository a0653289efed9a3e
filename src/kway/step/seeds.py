"""Random state by arithmetic: what a step draws depends on (seed, step, rank), never on what came before."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def seed_generators(key: int, device: torch.device) -> None:
    """Seed the generators of torch (CPU and ``device``), numpy and Python from a 63-bit key.

    Goes to the default generators directly: ``torch.manual_seed`` also walks over every lazily initialised
    device and costs fifty times as much.
    """
    torch.default_generator.manual_seed(key)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(key)
    np.random.seed(key & 0xFFFFFFFF)
    random.seed(key)


@contextmanager
def preserved(device: torch.device) -> Iterator[None]:
    """Give the caller's process its own random state back at the end."""
    state = torch.get_rng_state(), np.random.get_state(), random.getstate()
    on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    try:
        yield
    finally:
        torch.set_rng_state(state[0])
        np.random.set_state(state[1])
        random.setstate(state[2])
        if on_device is not None:
            torch.cuda.set_rng_state(on_device, device)
