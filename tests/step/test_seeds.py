import random
from contextlib import suppress

import numpy as np
import torch

from kway.step.seeds import preserved, seed_generators

CPU = torch.device("cpu")


def drawn():
    return torch.rand(3).tolist(), np.random.rand(3).tolist(), random.random()


def test_a_key_says_what_all_generators_draw():
    with preserved(CPU):
        seed_generators(5, CPU)
        first = drawn()
        drawn()
        seed_generators(5, CPU)
        assert drawn() == first
        seed_generators(6, CPU)
        assert all(a != b for a, b in zip(drawn(), first, strict=True))


def test_the_caller_goes_on_where_it_was():
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    expected = [drawn(), drawn()]
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    assert drawn() == expected[0]
    with suppress(ValueError), preserved(CPU):
        seed_generators(9, CPU)
        drawn()
        raise ValueError("stop")
    assert drawn() == expected[1]
