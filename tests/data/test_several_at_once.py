"""A data set that gives several samples at once (``__getitems__``) is asked so, and its batches are the same."""

import random
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset

import kway
from kway.data.loader import Loader
from kway.data.parts import take_apart
from kway.errors import DataError

X = torch.randn(11, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
DRAWS = {
    "nothing": lambda: 0.0,
    "torch": lambda: float(torch.rand(())),
    "numpy": np.random.rand,
    "python": random.random,
}


class Plain(Dataset):
    """Gives one sample at a time, with a number that is drawn."""

    def __init__(self, draw="nothing"):
        self.draw = draw

    def __len__(self):
        return len(X)

    def __getitem__(self, index):
        return X[index] + DRAWS[self.draw](), torch.tensor([float(index)], dtype=torch.float64)


class Several(Plain):
    """Gives several, and none alone. ``calls``: for which indices."""

    def __init__(self, *given):
        super().__init__(*given)
        self.calls = []

    def __getitem__(self, index):
        raise NotImplementedError

    def __getitems__(self, indices):
        self.calls.append(indices)
        return [Plain.__getitem__(self, index) for index in indices]


def shares(data, rank=0, size=1, **more):
    parts = take_apart(data, batch_size=4, seed=0, shuffle=True)
    loader = Loader(parts, rank=rank, size=size, seed=0, **more)
    return [share for epoch in range(2) for share in loader.epoch(epoch)]


def same(one, other):
    assert len(one) == len(other)
    for mine, others in zip(one, other, strict=True):
        for (own, count), (right, there) in zip(mine.micro, others.micro, strict=True):
            assert count == there
            assert all(torch.equal(a, b) for a, b in zip(own, right, strict=True))


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("more", [{}, {"micro_batch": 1}, {"shards": 3}], ids=["shares", "micro", "shards"])
@pytest.mark.parametrize("size", [1, 2])
def test_its_batches_are_those_of_samples_one_by_one(draw, more, size):
    for rank in range(size):
        expected = shares(Plain(draw), rank, size, **more)
        same(shares(Several(draw), rank, size, **more), expected)
        within = Subset(Several(draw), range(11))
        same(shares(within, rank, size, **more), expected)


def test_it_is_asked_once_for_a_share_and_for_single_samples_where_it_draws():
    several, drawing = Several(), Several("torch")
    for rank in (0, 1):
        expected = [share.indices.tolist() for share in shares(several, rank, 2)]
        assert several.calls == expected
        several.calls.clear()
    found = [share.indices.tolist() for share in shares(drawing)]
    assert drawing.calls == [found[0], *([index] for share in found for index in share)]


def test_a_subset_of_what_gives_single_samples_is_read_one_by_one():
    class Counts(Plain):
        read = 0

        def __getitem__(self, index):
            self.read += 1
            return super().__getitem__(index)

    data = Counts("torch")
    same(shares(Subset(data, range(11))), shares(Plain("torch")))
    assert data.read == 22


@pytest.mark.parametrize("change", [lambda found: found[1:], lambda found: (*found, found[0])])
def test_another_number_of_samples_is_refused(change):
    class Wrong(Several):
        def __getitems__(self, indices):
            return change(super().__getitems__(indices))

    with pytest.raises(DataError, match=r"__getitems__ of Wrong returned \d samples? where 4 were asked for"):
        shares(Wrong())


@pytest.mark.parametrize("size", [1, 2])
# Five shards: of one sample each, and one without any.
@pytest.mark.parametrize("more", [{}, {"micro_batch": 1}, {"shards": 5}], ids=["shares", "micro", "shards"])
@pytest.mark.parametrize("form", ["dict", "tensor"])
def test_a_batch_that_it_makes_itself_goes_to_a_collate_function(form, more, size):
    class Columns(Several):
        def __getitems__(self, indices):
            self.calls.append(indices)
            found = {"x": X[indices], "y": torch.tensor(indices)}
            return found if form == "dict" else torch.column_stack([*found.values()])

    def collate(batch):
        return (batch["x"], batch["y"]) if form == "dict" else (batch[:, :3], batch[:, 3].long())

    for rank in range(size):
        data = Columns()
        found = shares(DataLoader(data, batch_size=4, collate_fn=collate), rank, size, **more)
        assert {len(indices) for indices in data.calls} <= ({1} if more else {1, 2, 3, 4})
        for share in found:
            for column, expected in enumerate([X[share.indices], share.indices]):
                parts = [batch[column][:count] for batch, count in share.micro]
                assert torch.equal(torch.cat(parts), torch.as_tensor(expected))


def trained(context, data, **more):
    job = kway.Job(
        partial(nn.Linear, 3, 1),
        nn.MSELoss(),
        partial(torch.optim.SGD, lr=0.1),
        data,
        batch_size=4,
        precision="fp64",
    )
    with kway.parallel(job, devices="auto", strategy="data", **more) as p:
        for batch in p.batches(0):
            p.step(batch)
        return p.model.state_dict()


@pytest.mark.parametrize("draw", ["nothing", "torch"])
def test_bits_are_those_of_any_number_of_devices(ranks, draw):
    expected = trained(None, Plain(draw), exactness="bits")
    for size in (1, 2):
        for found in ranks.run(partial(trained, exactness="bits"), Several(draw), size=size):
            assert all(torch.equal(found[name], value) for name, value in expected.items())
