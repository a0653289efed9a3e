"""Tensors of any kind in one piece of memory: each at a place of its own, as if it lay alone."""

from itertools import pairwise

import pytest
import torch

from kway.checkpoints.block import places, size_of, views
from kway.checkpoints.dtypes import STORED_DTYPES


def mixed():
    return {
        "last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "odd": torch.ones(7, dtype=torch.bool),
        "scalar": torch.tensor(3),
        "none": torch.empty(0, 2, dtype=torch.float64),
        "complex": torch.tensor([1 + 2j], dtype=torch.complex128),
        "view": torch.arange(10, dtype=torch.int16)[::2],
        "wide": torch.ones(2, 1).expand(2, 3),
    }


def test_every_tensor_is_there_in_its_own_order():
    tensors = mixed()
    where = places(tensors)
    memory = torch.full((size_of(where),), 255, dtype=torch.uint8)
    found = views(memory, where)
    for name, tensor in tensors.items():
        found[name].copy_(tensor)
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    assert found["last"].stride() == tensors["last"].stride()
    assert {name: view.dtype for name, view in found.items()} == {n: t.dtype for n, t in tensors.items()}


def test_no_two_tensors_overlap_and_each_is_aligned():
    where = sorted(places(mixed()).values(), key=lambda place: place.start)
    assert all(a.start + a.size <= b.start for a, b in pairwise(where))
    assert all(place.start % 256 == 0 for place in where)


@pytest.mark.parametrize("dtype", sorted(STORED_DTYPES, key=str))
def test_every_dtype_that_a_checkpoint_holds_can_lie_there(dtype):
    where = places({"before": torch.ones(3, dtype=torch.uint8), "it": torch.empty(5, dtype=dtype)})
    memory = torch.zeros(size_of(where), dtype=torch.uint8)
    assert views(memory, where)["it"].shape == (5,)
    assert views(memory, where)["it"].dtype == dtype


def test_of_nothing_there_is_nothing():
    assert size_of({}) == 0
    assert views(torch.empty(0, dtype=torch.uint8), {}) == {}
