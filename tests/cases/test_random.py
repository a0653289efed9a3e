"""Order, dropout and augmentation: different where they must differ, equal where they must be equal."""

import random
from functools import partial
from itertools import chain

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, TensorDataset, WeightedRandomSampler

import kway


class Same(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.w * x


def own(output, _):
    return output


def job_of(data, **more):
    more = {"model": Same, "optimizer": partial(torch.optim.SGD, lr=0.01), **more}
    return kway.Job(loss=own, data=data, **more)


def indices(session, epochs=3):
    return [[batch.indices.tolist() for batch in session.batches(epoch)] for epoch in range(epochs)]


EIGHT = torch.arange(8.0)


@pytest.mark.parametrize("size", [2, 3])
def test_w10_every_epoch_has_an_order_of_its_own_and_covers_all(looped, size):
    by_rank = looped(job_of((EIGHT, EIGHT), batch_size=4), indices, size)
    orders = []
    for epoch in range(3):
        batches = zip(*(rank[epoch] for rank in by_rank), strict=True)
        orders.append([index for shares in batches for share in shares for index in share])
        assert sorted(orders[-1]) == list(range(8))
    assert len(set(map(tuple, orders))) == 3
    alone = looped(job_of((EIGHT, EIGHT), batch_size=4), indices, 1)[0]
    assert [list(chain(*epoch)) for epoch in alone] == orders


def weighted(draws):
    sampler = WeightedRandomSampler([1.0] * 4 + [0.0] * 4, draws)
    return DataLoader(TensorDataset(EIGHT, EIGHT), batch_size=10, sampler=sampler)


def test_w10_a_weighted_sampler_is_kept(looped):
    first, second = (list(chain(*epochs[0])) for epochs in looped(job_of(weighted(100)), indices))
    assert len(first) == len(second) == 50
    assert set(first) | set(second) <= {0, 1, 2, 3}
    assert first != second


def test_w10_a_batch_sampler_keeps_its_batches(looped):
    sampler = [[0, 1, 2], [3], [4, 5]]
    loader = DataLoader(TensorDataset(EIGHT, EIGHT), batch_sampler=sampler)
    first, second = (epochs[0] for epochs in looped(job_of(loader), indices))
    assert [a + b for a, b in zip(first, second, strict=True)] == sampler
    plain = DataLoader(TensorDataset(EIGHT, EIGHT), batch_sampler=BatchSampler([5, 1, 7], 2, False))
    first, second = (epochs[0] for epochs in looped(job_of(plain), indices))
    assert [a + b for a, b in zip(first, second, strict=True)] == [[5, 1], [7]]


class Dropped(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1000, bias=False)
        self.dropout = nn.Dropout(0.5)
        self.masks = []

    def forward(self, x):
        self.masks.append((self.dropout(torch.ones(1, 1000)) > 0).float())
        return self.dropout(self.layer(x))


def masks(session):
    initial = session.model.layer.weight.detach().clone()
    for batch in session.batches(0):
        session.step(batch)
    return initial, torch.stack(session.model.masks)


TWO = torch.ones(4, 1)


def test_w12_equal_weights_and_other_masks_on_every_rank(looped):
    job = job_of((TWO, TWO), model=Dropped, batch_size=2)
    (initial, first), (other, second) = looped(job, masks)
    assert torch.equal(initial, other)
    for step in range(2):
        assert 0.45 < float((first[step] == second[step]).float().mean()) < 0.55
    assert 0.45 < float((first[0] == first[1]).float().mean()) < 0.55
    (_, again), (_, other_again) = looped(job, masks)
    assert torch.equal(first, again)
    assert torch.equal(second, other_again)
    (_, other_seed), _ = looped(job_of((TWO, TWO), model=Dropped, batch_size=2, seed=1), masks)
    assert 0.4 < float((first == other_seed).float().mean()) < 0.6


class Drawn(Dataset):
    """Each sample draws from all three generators."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        draws = int(torch.randint(2**40, ())), int(np.random.randint(2**40)), random.getrandbits(40)
        return torch.tensor([float(index)]), torch.tensor([index, *draws])


def draws(session):
    return [target.tolist() for epoch in range(2) for batch in session.batches(epoch) for _, target in
            [batch.micro[0][0]]]  # fmt: skip


@pytest.mark.parametrize("workers", [0, 2])
def test_w13_every_rank_worker_and_epoch_draws_its_own(looped, workers):
    job = job_of(Drawn(), batch_size=4, workers=workers)
    by_rank = looped(job, draws)
    rows = [tuple(row) for rank in by_rank for batch in rank for row in batch]
    assert len(rows) == 16
    for generator in (1, 2, 3):
        assert len({row[generator] for row in rows}) == 16
    assert looped(job, draws) == by_rank
    # What a sample draws depends on neither ranks nor workers.
    alone = looped(job_of(Drawn(), batch_size=4, workers=0), draws, 1)[0]
    assert sorted(tuple(row) for batch in alone for row in batch) == sorted(rows)
