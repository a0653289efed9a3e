"""Parts of one batch that come in several shapes: found where a collate function of the user's pads them."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from kway.data.loader import Loader
from kway.data.padding import uneven
from kway.data.parts import take_apart

ROWS = [torch.arange(1, 2 + length) for length in (5, 4, 2, 1, 3, 3, 1, 0, 2, 1, 1)]


class Rows(Dataset):
    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


class Stream(IterableDataset):
    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return iter(self.rows)


def padded(rows, batch_first=True):
    return pad_sequence(rows, batch_first=batch_first), torch.tensor([len(row) for row in rows])


def fixed(rows):
    return torch.stack([torch.nn.functional.pad(row, (0, 6 - len(row))) for row in rows])


def joined(rows):
    """Samples one after the other, and where each begins: nothing is padded."""
    return torch.cat(rows).repeat(2, 1), torch.tensor([len(row) for row in rows]).cumsum(0)


def found(collate, size, rows=ROWS, kind=Rows, **more):
    data = DataLoader(kind(rows), batch_size=5, collate_fn=collate)
    parts = take_apart(data, batch_size=None, seed=0, shuffle=False)
    agree = {"compare": lambda number: [number] * size}
    loaders = [Loader(parts, rank=rank, size=size, seed=0, **agree, **more) for rank in range(size)]
    for loader in loaders:
        assert list(loader.epoch(0))
    return uneven(lambda own: [[loader.shapes.seen] for loader in loaders], loaders[0].shapes)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("kind", [Rows, Stream])
def test_parts_of_other_lengths_are_found_between_ranks(first, kind):
    lines = found(partial(padded, batch_first=first), 2, kind=kind)
    assert len(lines) == 1
    assert "of shape (6,) and (4,) in parts of one batch (epoch 1, batch 1)" in lines[0]
    # A sentence, and where there is more.
    assert len(lines[0].split()) < 35


def test_parts_of_other_lengths_are_found_between_the_micro_batches_of_one_device():
    assert "(6,) and (4,)" in found(padded, 1, micro_batch=3)[0]
    assert found(padded, 1) == []


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("micro_batch", [None, 1, 2])
def test_nothing_is_said_where_no_part_has_another_shape(size, micro_batch):
    assert found(fixed, size, micro_batch=micro_batch) == []


@pytest.mark.parametrize("size", [1, 2])
def test_nothing_is_said_of_what_has_no_row_a_sample(size):
    assert found(joined, size) == []


@pytest.mark.parametrize("length", [1, 2, 3, 4])
def test_a_length_that_is_as_large_as_a_part_is_no_other_shape(length):
    rows = [torch.ones(length) for _ in range(5)]
    for first in (True, False):
        assert found(partial(padded, batch_first=first), 2, rows) == []


@dataclass
class Batch:
    lines: Any
    name: str = "one"


class Sealed(list):
    """A list that is made in one way only."""

    def __init__(self, lines):
        if not isinstance(lines, torch.Tensor):
            raise ValueError("lines")
        super().__init__([lines])


@pytest.mark.parametrize(
    "wrap", [Batch, Sealed, lambda lines: {"a": (lines, "text")}, lambda lines: Batch([None, lines])]
)
def test_what_holds_the_tensors_may_be_anything_and_is_not_made_anew(wrap):
    assert "(6,) and (4,)" in found(lambda rows: wrap(padded(rows)[0]), 2)[0]


def test_a_part_without_samples_tells_nothing():
    # Of a batch of two, the last two ranks have none, and read the first, longer than any, to keep in step.
    assert found(padded, 4, [torch.ones(9), torch.ones(9)]) == []
    assert "(9,) and (8,)" in found(padded, 4, [torch.ones(9), torch.ones(8)])[0]


def test_shards_and_torchs_own_collate_are_not_looked_at():
    assert found(padded, 2, shards=4) == []
    assert found(default_collate, 5) == []


def test_only_the_first_batches_are_looked_at():
    data = DataLoader(Rows(ROWS * 20), batch_size=2, collate_fn=padded)
    parts = take_apart(data, batch_size=None, seed=0, shuffle=False)
    loader = Loader(parts, rank=0, size=2, seed=0)
    for epoch in range(2):
        assert len(list(loader.epoch(epoch))) == 110
    assert len(loader.shapes.seen) == 64
