"""Random state by arithmetic: what a step draws depends on (seed, step, rank), never on what came before."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from kway.data import generators

# The place at which what follows the gradients draws, the same on all ranks.
UPDATE = -1


def seed_generators(key: int, device: torch.device) -> None:
    """Seed the generators of torch (CPU and ``device``), numpy and Python from a 63-bit key."""
    generators.seed_generators(key)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(key)


class Draws(ABC):
    """From what a step draws random numbers, place by place: the shards of a rank, or its one share, and ``UPDATE``."""

    @abstractmethod
    def at(self, place: int) -> None:
        """Draw for ``place`` (from 0, or ``UPDATE``) from now on."""


class Keyed(Draws):
    """Seeds the generators of torch, numpy and Python with the key of a place."""

    def __init__(self, keys: Sequence[int], device: torch.device) -> None:
        self._keys, self._device = keys, device

    def at(self, place: int) -> None:
        """Seed them."""
        seed_generators(self._keys[place], self._device)


def has_drawn(device: torch.device) -> bool:
    """Whether a generator of torch (CPU or ``device``) has given numbers since it was last seeded."""
    host = torch.default_generator
    if not torch.equal(torch.Generator().manual_seed(host.initial_seed()).get_state(), host.get_state()):
        return True
    return device.type == "cuda" and torch.cuda.default_generators[device.index or 0].get_offset() > 0


@contextmanager
def preserved(device: torch.device) -> Iterator[None]:
    """Give the caller's process its own random state back at the end."""
    on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    try:
        with generators.preserved():
            yield
    finally:
        if on_device is not None:
            torch.cuda.set_rng_state(on_device, device)


@contextmanager
def preserved_everywhere() -> Iterator[None]:
    """Give the caller's process the random state of all its devices back at the end.

    GPUs that the process has not used yet are left asleep.
    """
    awake = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    on_devices = torch.cuda.get_rng_state_all() if awake else None
    try:
        with generators.preserved():
            yield
    finally:
        if on_devices is not None:
            torch.cuda.set_rng_state_all(on_devices)
