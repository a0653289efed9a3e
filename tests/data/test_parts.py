from collections import namedtuple

import cloudpickle
import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from kway.data.arrays import InMemory
from kway.data.order import KeyedOrder
from kway.data.parts import take_apart
from kway.errors import DataError, UsageError

X, Y = torch.arange(26.0).view(13, 2), torch.arange(13)


class Rows(Dataset):
    def __len__(self):
        return 13

    def __getitem__(self, index):
        return X[index], Y[index]


def apart(data, batch_size=None, shuffle=True, **more):
    return take_apart(data, batch_size=batch_size, seed=0, shuffle=shuffle, **more)


def every(order, epoch=0):
    return [order.batch(epoch, step).tolist() for step in range(order.steps(epoch))]


def test_tensors_keep_their_structure_and_are_read_at_once():
    indices = np.array([3, 0, 12])
    Pair = namedtuple("Pair", "x y")
    for data in ((X, Y), [X, Y], TensorDataset(X, Y), (X.numpy(), Y.numpy()), Pair(X, Y)):
        parts = apart(data, 4)
        assert parts.collate is None
        batch = parts.dataset.take(indices)
        assert isinstance(batch, tuple)
        assert torch.equal(batch[0], X[[3, 0, 12]])
        assert torch.equal(batch[1], Y[[3, 0, 12]])
    assert isinstance(apart(Pair(X, Y)).dataset.take(indices), Pair)
    named = apart({"image": X, "target": {"a": Y}}).dataset.take(indices)
    assert named["target"]["a"].tolist() == [3, 0, 12]
    assert torch.equal(apart(X).dataset.take(indices), X[[3, 0, 12]])


def test_one_sample_of_arrays_has_no_batch_dimension():
    x, y = apart((X, Y)).dataset[4]
    assert torch.equal(x, X[4])
    assert y.shape == ()


def test_a_subset_of_tensors_is_read_at_once():
    parts = apart(Subset(Subset(TensorDataset(X, Y), [1, 3, 5, 7]), [3, 1]), 4)
    assert isinstance(parts.dataset, InMemory)
    assert parts.dataset.take(np.array([0, 1]))[1].tolist() == [7, 3]


def test_a_subset_of_a_data_set_is_asked_for_samples():
    parts = apart(Subset(Rows(), [1, 3]), 4)
    assert not isinstance(parts.dataset, InMemory)
    assert parts.order.samples == 2


@pytest.mark.parametrize("make", [tuple, lambda pair: {"x": pair[0], "y": pair[1]}])
def test_a_list_of_samples_is_a_data_set_of_samples(make):
    samples = [make([X[index], Y[index : index + 1]]) for index in range(5)]
    parts = apart(samples)
    assert parts.order.samples == 5
    assert not isinstance(parts.dataset, InMemory)
    assert parts.collate(samples[:2])


def test_parts_travel_to_other_processes():
    sampler = WeightedRandomSampler([1.0] * 13, 7, generator=torch.Generator())
    parts = apart(DataLoader(Rows(), batch_size=4, sampler=sampler))
    before = every(parts.order)
    for copied in (cloudpickle.loads(cloudpickle.dumps(parts)), parts):
        assert every(copied.order, 1) != before
        assert every(copied.order) == before


def test_arrays_of_any_layout_are_read(tmp_path):
    np.save(tmp_path / "x.npy", X.numpy())
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    swapped = X.numpy().astype(">f4")
    frozen = X.numpy().copy()
    frozen.flags.writeable = False
    for array in (mapped, swapped, frozen, X.numpy()[::-1]):
        taken = apart(array).dataset.take(np.array([2]))
        assert np.array_equal(taken.numpy(), np.asarray(array)[[2]])


def test_the_default_batch_is_256_and_it_shuffles():
    order = apart((X, Y)).order
    assert order == KeyedOrder(13, 256, 0, True)
    assert every(apart((X, Y), shuffle=False).order) == [list(range(13))]


def test_a_loader_is_taken_apart():
    collate, init = (lambda samples: samples), (lambda worker: None)
    loader = DataLoader(
        Rows(),
        batch_size=4,
        shuffle=True,
        collate_fn=collate,
        num_workers=2,
        worker_init_fn=init,
        drop_last=True,
    )
    parts = apart(loader)
    assert parts.order == KeyedOrder(13, 4, 0, True, drop_last=True)
    assert (parts.collate, parts.workers, parts.worker_init) == (collate, 2, init)
    assert any("1 samples are left out" in notice for notice in parts.notices)
    assert apart(loader, workers=0).workers == 0
    assert apart(loader, 4).order.batch_size == 4


def test_a_loader_decides_whether_to_shuffle_but_evaluation_never_does():
    assert not apart(DataLoader(Rows(), batch_size=4)).order.shuffle
    assert not apart(DataLoader(Rows(), batch_size=4, shuffle=True), shuffle=False).order.shuffle
    explicit = BatchSampler(RandomSampler(Rows()), 4, False)
    assert apart(DataLoader(Rows(), batch_sampler=explicit)).order == KeyedOrder(13, 4, 0)


def test_a_loader_of_tensors_is_read_at_once_unless_it_collates():
    assert apart(DataLoader(TensorDataset(X, Y), batch_size=4, num_workers=2)).workers == 0
    parts = apart(DataLoader(TensorDataset(X, Y), batch_size=4, collate_fn=len, num_workers=2))
    assert (parts.collate, parts.workers) == (len, 2)


def test_a_batch_size_replaces_that_of_a_loader_and_says_so():
    sampler = WeightedRandomSampler([1.0] * 4 + [0.0] * 9, 20)
    parts = apart(DataLoader(Rows(), batch_size=4, shuffle=True, collate_fn=len, drop_last=True), 7)
    assert (parts.order, parts.collate) == (KeyedOrder(13, 7, 0, True, drop_last=True), len)
    assert parts.notices[0] == "batch size 7 instead of the DataLoader's 4"
    assert "the last 6 samples are left out" in parts.notices[1]
    kept = apart(DataLoader(Rows(), batch_size=4, sampler=sampler), 7)
    assert [len(batch) for batch in every(kept.order)] == [7, 7, 6]
    assert {index for batch in every(kept.order) for index in batch} == {0, 1, 2, 3}
    assert not apart(DataLoader(Rows(), batch_size=4), 4).notices


class Buckets(BatchSampler):
    """A batch sampler of the user's own."""


def test_other_samplers_are_kept():
    sampler = WeightedRandomSampler([1.0] * 4 + [0.0] * 9, 100)
    parts = apart(DataLoader(Rows(), batch_size=8, sampler=sampler))
    batches = every(parts.order)
    assert {index for batch in batches for index in batch} == {0, 1, 2, 3}
    assert [len(batch) for batch in batches] == [8] * 12 + [4]
    assert any("WeightedRandomSampler is replayed" in notice for notice in parts.notices)
    chosen = every(apart(DataLoader(Rows(), batch_size=8, sampler=SubsetRandomSampler([1, 5]))).order)
    assert [sorted(batch) for batch in chosen] == [[1, 5]]


def test_batches_of_a_batch_sampler_are_kept_whole():
    batches = [[0, 1, 2], [3], [4, 5]]
    assert every(apart(DataLoader(Rows(), batch_sampler=batches)).order) == batches
    with pytest.raises(UsageError, match=r"batch_size=4 .*\(list\).*; leave batch_size \(--batch-size\) out"):
        apart(DataLoader(Rows(), batch_sampler=batches), 4)
    buckets = DataLoader(Rows(), batch_sampler=Buckets(RandomSampler(Rows()), 4, False))
    with pytest.raises(UsageError, match=r"batch_size=7 .*\(Buckets, batch_size=4\)"):
        apart(buckets, 7)
    assert apart(buckets, 4).order.batch_size == 4


def test_a_sampler_that_splits_is_refused():
    sampler = DistributedSampler(Rows(), num_replicas=2, rank=0)
    with pytest.raises(UsageError, match=r"DistributedSampler.*splits the batch itself"):
        apart(DataLoader(Rows(), batch_size=4, sampler=sampler))


class NoLength:
    def __getitem__(self, index):
        return index


@pytest.mark.parametrize(
    ("data", "error", "text"),
    [
        ("fashion-mnist", UsageError, "a text"),
        (DataLoader(Rows(), batch_size=None), UsageError, "batch_size=None"),
        (iter([1]), UsageError, "iterator"),
        (NoLength(), UsageError, "len"),
        (Rows, UsageError, r"class Rows.*Rows\(\)"),
        (3, UsageError, "int"),
        ([], DataError, "0 samples"),
        (torch.empty(0, 2), DataError, "0 samples"),
        ((X, Y[:12]), DataError, r"\[13, 12\]"),
        (torch.tensor(3.0), DataError, "without dimensions"),
        (np.array(["a", "b"]), DataError, "U1"),
        (Subset(TensorDataset(X), [0, 13]), DataError, "13"),
    ],
)
def test_data_that_cannot_work_is_refused_with_the_reason(data, error, text):
    with pytest.raises(error, match=text):
        apart(data)


@pytest.mark.parametrize("more", [{"batch_size": 0}, {"batch_size": 2.0}, {"workers": -1}])
def test_bad_numbers_are_refused(more):
    with pytest.raises(UsageError, match=str(next(iter(more.values())))):
        apart(Rows(), **more)
