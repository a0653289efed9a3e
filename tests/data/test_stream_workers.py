"""A stream in a loader process: one a rank, with the same result as without."""

import os
import random
import sys

import cloudpickle
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from kway.data.agreement import alone
from kway.data.loader import Loader
from kway.data.parts import take_apart
from kway.errors import DataError

pytestmark = pytest.mark.starts


class Drawn(IterableDataset):
    """Draws its order and its items; would split itself, as torch's documentation shows, among workers."""

    def __init__(self, items=13, fault=None):
        self.items, self.fault, self.epoch = items, fault, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        for index in random.sample(range(self.items), self.items)[first::step]:
            if index == self.fault:
                raise KeyError(f"item {index}")
            yield index, self.epoch, int(torch.randint(2**40, ())), int(np.random.randint(2**40))


@pytest.fixture(autouse=True)
def by_value():
    module = sys.modules[__name__]
    cloudpickle.register_pickle_by_value(module)
    yield
    cloudpickle.unregister_pickle_by_value(module)


def loader(data, workers, rank=0, size=1, compare=alone, **more):
    given = DataLoader(data, batch_size=4, num_workers=workers, **more)
    parts = take_apart(given, batch_size=None, seed=0, shuffle=True)
    return Loader(parts, rank=rank, size=size, seed=0, micro_batch=1, compare=compare)


def read(reader, *epochs):
    return [
        (
            share.epoch,
            share.step,
            share.count,
            share.total,
            share.indices.tolist(),
            [part.tolist() for batch, _ in share.micro for part in batch],
        )
        for epoch in epochs
        for share in reader.epoch(epoch)
    ]


@pytest.mark.parametrize("rank", [0, 1])
def test_any_number_of_workers_reads_the_same(rank):
    numbers = {}

    def compare(number):
        numbers.setdefault(workers, []).append(number)
        return [number, number]

    found = {}
    for workers in (0, 1, 2):
        reader = loader(Drawn(), workers, rank, 2, compare)
        found[workers] = read(reader, 0, 1, 0)  # once more, as a validation does
        reader.close()
    assert found[0] == found[1] == found[2]
    assert numbers[0] == numbers[1] == numbers[2]
    assert len(numbers[0]) == 15


def test_the_worker_stays_also_when_an_epoch_is_left():
    reader = loader(
        Drawn(), 1, collate_fn=lambda samples: (torch.tensor([s[0] for s in samples]), os.getpid())
    )
    expected = [
        index for share in loader(Drawn(), 0).epoch(2) for b, _ in share.micro for index in b[0].tolist()
    ]
    seen = {next(reader.epoch(epoch)).micro[0][0][1] for epoch in range(2)}
    shares = list(reader.epoch(2))
    assert [index for share in shares for b, _ in share.micro for index in b[0].tolist()] == expected
    seen |= {batch[1] for share in shares for batch, _ in share.micro}
    reader.close()
    assert len(seen) == 1
    assert os.getpid() not in seen


def test_an_error_and_an_empty_stream_come_out_of_the_worker():
    reader = loader(Drawn(fault=7), 1)
    with pytest.raises(KeyError, match="item 7") as caught:
        read(reader, 0)
    assert "in loader worker 0, epoch 0, step" in caught.value.__notes__[0]
    reader.close()
    reader = loader(Drawn(0), 1)
    with pytest.raises(DataError, match="in epoch 1, Drawn gave no item"):
        read(reader, 0)
    reader.close()


def test_what_mentions_a_module_of_a_class_of_its_own_travels():
    def collate(samples):
        return [torch.tensor([sample[0], int(torch.backends.cudnn.benchmark)]) for sample in samples]

    cudnn = torch.backends.cudnn
    reader = loader(Drawn(), 1, collate_fn=lambda samples: (collate(samples), cudnn.__name__))
    assert {batch[1] for share in reader.epoch(0) for batch, _ in share.micro} == {"torch.backends.cudnn"}
    reader.close()
