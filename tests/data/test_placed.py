"""Shares taken from data on the device, here the CPU, against those that a loader reads on the host."""

import pickle
from collections import namedtuple
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Subset, TensorDataset

from kway.data import device_order, device_rows, placed
from kway.data.arrays import Arrays, InMemory, Selection
from kway.data.device_rows import bytes_needed
from kway.data.images import Images
from kway.data.loader import Loader
from kway.data.order import KeyedOrder
from kway.data.parts import take_apart
from kway.data.placed import fits, place
from kway.data.share import outline

CPU = torch.device("cpu")
ROOM = 1 << 40
DRAW = torch.Generator().manual_seed(0)
X, Y = torch.randn(29, 3, 4, generator=DRAW), torch.arange(29)
PIXELS = torch.arange(29 * 64).remainder(256).to(torch.uint8).view(29, 1, 8, 8)
Pair = namedtuple("Pair", "image label")


def both(data, epoch=1, start=0, rank=0, size=1, micro_batch=None, shards=None, **more):
    """The shares of an epoch as the host reads them, and as they are taken from the device."""
    options = {"batch_size": 8, "seed": 3, "shuffle": True, **more}
    parts = take_apart(data, **options)
    cut = {"rank": rank, "size": size, "micro_batch": micro_batch, "shards": shards}
    host = Loader(parts, seed=3, **cut)
    there = place(parts, CPU, partial(outline, **cut), ROOM)
    assert there is not None
    return list(host.epoch(epoch, start)), list(there.epoch(epoch, start))


def flat(batch):
    if isinstance(batch, dict):
        return [("dict", *batch)] + [leaf for item in batch.values() for leaf in flat(item)]
    if isinstance(batch, tuple):
        return [type(batch)] + [leaf for item in batch for leaf in flat(item)]
    return [batch]


def assert_same(host, there):
    assert len(host) == len(there) > 0
    for one, other in zip(host, there, strict=True):
        facts = [(s.count, s.total, s.epoch, s.step, [c for _, c in s.micro]) for s in (one, other)]
        assert facts[0] == facts[1]
        assert isinstance(other.indices, np.ndarray)
        assert other.indices.dtype == np.int64
        assert one.indices.tolist() == other.indices.tolist()
        for (a, _), (b, _) in zip(one.micro, other.micro, strict=True):
            for left, right in zip(flat(a), flat(b), strict=True):
                if not isinstance(left, torch.Tensor):
                    assert left == right
                    continue
                assert (left.dtype, left.shape) == (right.dtype, right.shape)
                assert left.shape[0] < 2 or not left.numel() or left.stride() == right.stride()
                assert torch.equal(left, right)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
@pytest.mark.parametrize(
    "how",
    [{}, {"micro_batch": 3}, {"micro_batch": 1}, {"shards": 8}, {"shards": 5}, {"shuffle": False},
     {"start": 2}, {"batch_size": 3}, {"batch_size": 64}],
)  # fmt: skip
def test_shares_are_those_of_the_host(size, how):
    for rank in range(size):
        assert_same(*both((X, Y), rank=rank, size=size, **how))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_last_batch_that_is_dropped_is_dropped(size):
    data = DataLoader(TensorDataset(X, Y), batch_size=8, shuffle=True, drop_last=True)
    for rank in range(size):
        host, there = both(data, rank=rank, size=size, batch_size=None)
        assert len(there) == 3
        assert_same(host, there)


IMAGES = torch.randn(29, 4, 5, 6, generator=DRAW)
LAST = IMAGES.to(memory_format=torch.channels_last)
ONE = torch.randn(29, 1, 5, 6, generator=DRAW)
CHOSEN = np.array([3, -1, 7, 7, 20, 0, 11, 12, 13, -29, 5])


@pytest.mark.parametrize(
    "data",
    [
        Images("set", PIXELS, Y % 10, 10),
        Selection(Images("set", PIXELS, Y % 10, 10), CHOSEN),
        Selection(Selection(Arrays((X, Y)), CHOSEN), np.array([4, 1, -2, 0])),
        Subset(Subset(TensorDataset(X, Y), range(3, 25)), [0, 5, 21, 6]),
        {"x": X, "more": (Y, Y.numpy().astype(np.uint8)), "pair": Pair(X > 0, X.double())},
        X.to(torch.complex64),
        (LAST, ONE, ONE.to(memory_format=torch.channels_last)),
        Selection(Arrays((LAST, LAST[:, :3], IMAGES.transpose(1, 3), X[:, ::2])), CHOSEN),
        (IMAGES.transpose(1, 2), IMAGES[:, :, ::2], X[:, 0].t().contiguous().t()),
        torch.arange(29.0).expand(3, 29).t(),
        (np.asfortranarray(X.numpy()), Y.numpy()[::-1], np.zeros((29, 0))),
        torch.arange(29 * 3, dtype=torch.bfloat16).view(29, 3),
    ],
    ids=lambda data: type(data).__name__,
)
def test_data_of_any_form(data):
    assert_same(*both(data))
    assert_same(*both(data, rank=1, size=2, micro_batch=2))


def test_an_array_on_disk(tmp_path):
    np.save(tmp_path / "x.npy", X.numpy())
    assert_same(*both((np.load(tmp_path / "x.npy", mmap_mode="r"), Y)))


WIDE = torch.randn(1600, 128, generator=DRAW)  # 512 bytes a row: what is taken at once is aligned


@pytest.mark.parametrize("how", [{}, {"rank": 1, "size": 3}, {"micro_batch": 5}, {"shards": 8}, {"start": 7}])
def test_many_steps_at_once(how, monkeypatch):
    assert_same(*both(WIDE, batch_size=16, **how))
    monkeypatch.setattr(placed, "_MOST_STEPS", 7)
    host, there = both(WIDE, batch_size=17, **how)
    assert_same(host, there)
    # Steps 1 to 7 of those taken lie in one piece of memory; the first is taken by itself.
    places = [share.micro[0][0].untyped_storage().data_ptr() for share in there[:9]]
    assert len({places[0], places[1], places[8]}) == 3
    assert len(set(places[1:8])) == 1
    assert all(batch.data_ptr() % 64 == 0 for share in there for batch, _ in share.micro)


def test_rows_that_are_not_aligned_are_taken_step_by_step():
    _, there = both(WIDE[:, :100], batch_size=17)
    places = [share.micro[0][0].untyped_storage().data_ptr() for share in there]
    assert len(set(places)) == len(places)


@pytest.mark.parametrize("data", [WIDE, WIDE[:, :100].contiguous()])
def test_a_batch_may_be_changed_in_place(data):
    kept = data.clone()
    host, there = both(data, batch_size=16)
    scale = torch.ones((), requires_grad=True)
    for share in there:
        share.micro[0][0].mul_(scale * 2).sum().backward()
    assert torch.equal(data, kept)
    for one, other in zip(host, there, strict=True):
        assert torch.equal(one.micro[0][0] * 2, other.micro[0][0].detach())


def test_a_share_can_be_copied_changed_and_sent():
    _, (share, *_) = both((X, Y))
    sent = pickle.loads(pickle.dumps(share))
    other = replace(share, micro=[])
    assert sent.indices.tolist() == share.indices.tolist() == other.indices.tolist() != []
    assert "PlacedShare(micro=" in repr(share)
    with pytest.raises(AttributeError, match="samples"):
        share.samples  # noqa: B018


def test_indices_are_not_worked_out_before_they_are_asked_for(monkeypatch):
    def refuse(*_):
        raise AssertionError("worked out")

    _, shares = both((X, Y))
    monkeypatch.setattr(KeyedOrder, "batch", refuse)
    with pytest.raises(AssertionError, match="worked out"):
        shares[0].indices  # noqa: B018


def test_the_order_of_the_next_epoch_is_there_when_an_epoch_ends(monkeypatch):
    worked_out = []
    original = placed.order_on

    def order_on(device, order, epoch):
        worked_out.append(epoch)
        return original(device, order, epoch)

    monkeypatch.setattr(placed, "order_on", order_on)
    parts = take_apart((X, Y), batch_size=8, seed=3, shuffle=True)
    there = place(parts, CPU, partial(outline, rank=0, size=1, micro_batch=None), ROOM)
    # One that is left before its end, and one that is gone back to.
    for epoch, known in ((0, [0, 1]), (1, [0, 1, 2]), (5, [0, 1, 2, 5, 6]), (0, [0, 1, 2, 5, 6, 0, 1])):
        shares = list(there.epoch(epoch))
        assert worked_out == known
        assert [share.micro[0][0][1].tolist() for share in shares] == [
            Y[parts.order.batch(epoch, step)].tolist() for step in range(4)
        ]
    next(there.epoch(1))
    assert worked_out == known


def test_at_most_a_quarter_of_what_is_free():
    assert fits(25, 100)
    assert not fits(26, 100)
    assert not fits(1, 0)


class Marked(torch.Tensor):
    """A tensor that may do anything when it is indexed."""


ORDER = KeyedOrder(29, 8, 0)


@pytest.mark.parametrize(
    ("data", "size"),
    [
        (Arrays((X.numpy(), Y.numpy())), 29 * (12 * 4 + 8)),
        (Arrays(X), 0),  # on the device already
        (Selection(Arrays(X), np.arange(5)), 5 * 12 * 4),
        (Arrays(torch.zeros(1).expand(29).numpy()), 29 * 4),
        (Arrays(X.to_sparse()), None),
        (Arrays(X.as_subclass(Marked)), None),
        (Arrays(np.zeros(29, dtype=np.uint16)), None),
    ],
)
def test_what_data_takes_on_the_device(data, size):
    needed = bytes_needed(data.rows(), ORDER, CPU)
    assert needed == (None if size is None else size + 29 * 8)


class Own(InMemory):
    """A data set that says nothing about its arrays."""

    def __len__(self):
        return 29

    def take(self, indices):
        return torch.from_numpy(indices)


@pytest.mark.parametrize(
    ("data", "free"),
    [
        (Own(), ROOM),
        (Selection(Own(), np.arange(4)), ROOM),
        (list(zip(X, Y, strict=True)), ROOM),
        (X.to_sparse(), ROOM),
        (X.numpy(), 4 * (X.nbytes + 29 * 8) - 1),
        (DataLoader(TensorDataset(X), batch_size=8, collate_fn=len), ROOM),
        (DataLoader(TensorDataset(X), batch_size=8, sampler=torch.utils.data.SubsetRandomSampler([1, 5])), ROOM),
    ],
)  # fmt: skip
def test_what_does_not_belong_on_the_device_is_left_to_the_host(data, free):
    parts = take_apart(data, batch_size=8, seed=0, shuffle=True)
    assert place(parts, CPU, partial(outline, rank=0, size=1, micro_batch=None), free) is None


def test_a_device_that_has_no_room_after_all_is_no_error(monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(placed, "copied", full)
    parts = take_apart(X, batch_size=8, seed=0, shuffle=True)
    assert place(parts, CPU, partial(outline, rank=0, size=1, micro_batch=None), ROOM) is None


@pytest.mark.parametrize("chunk", [64, 1000])
def test_data_is_copied_in_pieces(monkeypatch, chunk):
    monkeypatch.setattr(device_rows, "_CHUNK_BYTES", chunk)
    monkeypatch.setattr(device_order, "_CHUNK", 7)
    assert_same(*both((X.numpy(), Y.numpy())))
    assert_same(*both(Selection(Arrays(LAST), CHOSEN)))


@pytest.mark.parametrize("samples", [29, 1000])
@pytest.mark.parametrize("start", [0, 3])
def test_batches_worked_out_together_are_those_worked_out_one_by_one(monkeypatch, samples, start):
    monkeypatch.setattr("kway.data.order._BLOCK", 20)
    order = KeyedOrder(samples, 6, 1, drop_last=bool(start))
    found = [batch.tolist() for batch in order.batches(2, start)]
    assert found == [order.batch(2, step).tolist() for step in range(start, order.steps(2))]


def test_pixels_are_divided_as_numbers_are():
    scaled, _ = Images(
        "set", torch.arange(256).to(torch.uint8).view(256, 1, 1, 1), torch.zeros(256).long(), 1
    ).take(np.arange(256))
    assert scaled.flatten().tolist() == (np.arange(256, dtype=np.float32) / np.float32(255)).tolist()


def test_tensors_that_were_changed_since_the_last_epoch_are_copied_anew(monkeypatch):
    copies = []
    original = placed.copied

    def copied(leaf, chosen, device):
        copies.append(len(leaf))
        return original(leaf, chosen, device).clone()  # as on a GPU, where it never is the host's own memory

    monkeypatch.setattr(placed, "copied", copied)
    with torch.inference_mode():
        free = X.clone()
    x, y = X.clone(), Y.clone()
    parts = take_apart((x, y, free), batch_size=29, seed=0, shuffle=False)
    there = place(parts, CPU, partial(outline, rank=0, size=1, micro_batch=None), ROOM)
    (share,) = there.epoch(0)
    (share,) = there.epoch(1)
    assert copies == [29] * 3
    y[3] = 100
    (share,) = there.epoch(2)
    assert copies == [29] * 6
    assert share.micro[0][0][1].tolist() == [*range(3), 100, *range(4, 29)]
