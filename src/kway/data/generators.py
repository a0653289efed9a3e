"""The global random generators that a data set may draw from: torch's (CPU), numpy's and Python's."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


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
    states = torch.default_generator.get_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.default_generator.set_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])
