"""The global random generators that a data set may draw from: torch's (CPU), numpy's and Python's."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

States = tuple[torch.Tensor, Any, Any]  # of torch, numpy and Python


def seed_generators(seed: int) -> None:
    """Seed the three global generators, for example before one sample is read.

    Not ``torch.manual_seed``: that also visits every accelerator and costs fifty times as much.
    """
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)


@contextmanager
def preserved() -> Iterator[None]:
    """Put the three global generators back, at the end, into the state in which they were."""
    before = states()
    try:
        yield
    finally:
        restore(before)


class OwnGenerators:
    """A course of random numbers of its own, which goes on from one use to the next.

    Between two uses the process draws what it would have drawn without them.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._states: States | None = None

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Let the three global generators follow this course while open."""
        with preserved():
            if self._states is None:
                seed_generators(self._seed)
            else:
                restore(self._states)
            try:
                yield
            finally:
                self._states = states()


def states() -> States:
    """Return the states of the three global generators."""
    return torch.default_generator.get_state(), np.random.get_state(), random.getstate()


def restore(states: States) -> None:
    """Put the three global generators into states that they had."""
    torch.default_generator.set_state(states[0])
    np.random.set_state(states[1])
    random.setstate(states[2])


def same(first: States, second: States) -> bool:
    """Whether nothing was drawn, nor a generator seeded, between two looks at the states."""
    numpys = [(own[1].tobytes(), own[2:]) for own in (first[1], second[1])]
    return torch.equal(first[0], second[0]) and first[2] == second[2] and numpys[0] == numpys[1]
