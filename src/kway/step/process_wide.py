"""What a process has once and a step depends on: generators of random numbers and flags of torch.

Ranks that are threads of one process each find their own when it is their turn.
"""

import random
from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np
import torch

from kway.data import generators
from kway.step import tf32

Undo = Callable[[], None]


def drawn_from() -> list[Any]:
    """Return the generators on the host that a process has for all code: Python's, numpy's and torch's."""
    drawing: list[Any] = [random.random, np.random.random]
    return [*(each.__self__ for each in drawing), torch.default_generator]


def held() -> Undo:
    """Take note of the process's generators and flags; return what puts them back as they are now.

    Not the number of CPU threads, which each thread of a process has for itself.
    """
    filling: Any = import_module("torch.utils.deterministic")
    cudnn = torch.backends.cudnn
    states = generators.states()
    dtype = torch.get_default_dtype()
    algorithms = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    flags, fewer_bits = (cudnn.benchmark, cudnn.deterministic), tf32.kept()
    fills = filling.fill_uninitialized_memory

    def put_back() -> None:
        generators.restore(states)
        torch.set_default_dtype(dtype)
        torch.use_deterministic_algorithms(algorithms, warn_only=warns)
        cudnn.benchmark, cudnn.deterministic = flags
        fewer_bits()
        filling.fill_uninitialized_memory = fills

    return put_back


def drawing() -> Callable[[], bool]:
    """Return what says whether the process's generators were drawn from, or seeded, since."""
    before = generators.states()
    return lambda: not generators.same(before, generators.states())
