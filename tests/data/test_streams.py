"""Data sets that are read from the start: which they are, and what each rank gets of them."""

import random

import numpy as np
import pytest
import torch
from torch.utils.data import ChainDataset, DataLoader, IterableDataset, get_worker_info

from kway.data.loader import Loader
from kway.data.parts import take_apart
from kway.data.stream_reader import held
from kway.data.streams import StreamOrder
from kway.errors import DataError, UsageError


class Stream(IterableDataset):
    def __init__(self, items=13):
        self.items = items

    def __iter__(self):
        return iter([(torch.tensor([float(i), 1.0]), i) for i in range(self.items)])


class Plain:
    """Iterable, without being a data set of torch."""

    def __iter__(self):
        yield from Stream()


class Sized(Stream):
    def __len__(self):
        return self.items


class Drawn(IterableDataset):
    """Its items come from a shuffle buffer and draw from all three generators."""

    def __init__(self, items=13):
        self.items = items

    def __iter__(self):
        left = list(range(self.items))
        while left:
            index = left.pop(random.randrange(min(4, len(left))))
            yield index, int(torch.randint(2**40, ())), int(np.random.randint(2**40)), random.getrandbits(40)


def loader(data, rank=0, size=1, batch_size=4, seed=0, **more):
    settings = {name: more.pop(name) for name in ("micro_batch", "shards", "compare") if name in more}
    parts = take_apart(data, batch_size=batch_size, seed=seed, shuffle=more.pop("shuffle", False), **more)
    return Loader(parts, rank=rank, size=size, seed=seed, **settings)


def batches(reader, epoch=0):
    return [
        (share.count, share.total, share.indices.tolist(), [part.tolist() for part in share.micro[0][0]])
        for share in reader.epoch(epoch)
    ]


@pytest.mark.parametrize("data", [Stream(), Plain(), Sized(), ChainDataset([Stream(6), Stream(7)])])
def test_a_stream_is_read_in_its_own_order_and_its_last_batch_is_partial(data):
    shares = list(loader(data).epoch(0))
    assert [share.indices.tolist() for share in shares] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12]]
    assert [share.total for share in shares] == [4, 4, 4, 1]
    assert [(share.epoch, share.step) for share in shares] == [(0, step) for step in range(4)]
    if not isinstance(data, ChainDataset):
        assert [int(x) for share in shares for x in share.micro[0][0][0][:, 0]] == list(range(13))


@pytest.mark.parametrize("more", [{}, {"micro_batch": 2}, {"shards": 6}])
@pytest.mark.parametrize("size", [1, 2, 3, 6])
@pytest.mark.parametrize("items", [1, 8, 13])
def test_every_item_reaches_one_rank_as_from_a_list(size, items, more):
    for rank in range(size):
        streamed = list(loader(Stream(items), rank, size, **more).epoch(0))
        listed = list(loader(list(Stream(items)), rank, size, **more).epoch(0))
        assert len(streamed) == len(listed) == -(-items // 4)
        for one, other in zip(streamed, listed, strict=True):
            assert (one.count, one.total, one.indices.tolist()) == (
                other.count, other.total, other.indices.tolist(),
            )  # fmt: skip
            for (left, counted), (right, expected) in zip(one.micro, other.micro, strict=True):
                assert counted == expected
                assert all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def test_all_ranks_draw_the_same_stream_and_the_process_keeps_its_own():
    alone = batches(loader(Drawn()), 1)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    shares = [list(loader(Drawn(), rank, 2).epoch(1)) for rank in range(2)]
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (np.random.get_state()[1].tolist(), random.getstate())
    joined = []
    for first, second in zip(*shares, strict=True):
        parts = [[part[: share.count].tolist() for part in share.micro[0][0]] for share in (first, second)]
        joined.append([a + b for a, b in zip(*parts, strict=True)])
    assert joined == [content for *_, content in alone]


def test_what_a_process_draws_between_two_batches_does_not_enter():
    quiet = batches(loader(Drawn()))
    noisy = []
    for share in loader(Drawn()).epoch(0):
        torch.manual_seed(share.step), np.random.seed(0), random.seed(0)
        noisy.append([part.tolist() for part in share.micro[0][0]])
    assert noisy == [content for *_, content in quiet]


def test_epochs_and_seeds_draw_anew_and_repeat():
    runs = [batches(loader(Drawn(), seed=seed), epoch) for seed, epoch in ((0, 0), (0, 1), (1, 0))]
    assert runs[0] != runs[1] != runs[2] != runs[0]
    reader = loader(Drawn())
    assert [batches(reader, 0), batches(reader, 1), batches(reader, 0)] == [runs[0], runs[1], runs[0]]


def test_set_epoch_is_called_before_the_stream_is_opened():
    class ByEpoch(Stream):
        def set_epoch(self, epoch):
            self.items = epoch + 1

    reader = loader(ByEpoch())
    assert [batches(reader, epoch)[0][1] for epoch in (2, 0, 1)] == [3, 1, 2]


def test_an_epoch_can_start_in_the_middle():
    whole = list(loader(Drawn()).epoch(3))
    rest = list(loader(Drawn()).epoch(3, start=2))
    assert [share.step for share in rest] == [2, 3]
    for one, other in zip(rest, whole[2:], strict=True):
        assert one.indices.tolist() == other.indices.tolist()
        assert all(torch.equal(a, b) for a, b in zip(one.micro[0][0], other.micro[0][0], strict=True))
    assert list(loader(Drawn()).epoch(3, start=4)) == []


def test_an_epoch_that_was_left_is_begun_anew():
    reader = loader(Drawn())
    expected = batches(loader(Drawn()))
    old = reader.epoch(0)
    next(old)
    assert batches(reader) == expected
    with pytest.raises(UsageError, match="one epoch at a time"):
        next(old)


def test_an_endless_stream_is_read_as_far_as_it_is_asked_for():
    class Endless(IterableDataset):
        def __iter__(self):
            number = 0
            while True:
                yield number
                number += 1

    shares = loader(Endless()).epoch(0)
    assert [next(shares).micro[0][0].tolist() for _ in range(3)] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9, 10, 11],
    ]


def test_a_loader_is_taken_apart():
    collate, init = len, (lambda worker: None)
    given = DataLoader(
        Stream(), batch_size=5, collate_fn=collate, num_workers=2, worker_init_fn=init, drop_last=True
    )
    parts = take_apart(given, batch_size=None, seed=0, shuffle=True)
    assert parts.order == StreamOrder(None, 5, drop_last=True)
    assert (parts.collate, parts.workers, parts.worker_init) == (collate, 1, init)
    said = "\n".join(parts.notices)
    assert "every rank reads all of it" in said
    assert "not shuffled" in said
    assert "one loader worker a rank reads it, not 2" in said
    assert "drop_last" in said
    whole = take_apart(given, batch_size=5, seed=0, shuffle=False, every=True)
    assert whole.order == StreamOrder(None, 5)
    assert "drop_last of the DataLoader is not kept: every sample counts" in whole.notices
    reader = Loader(take_apart(given, batch_size=5, seed=0, shuffle=True, workers=0), rank=0, size=1, seed=0)
    assert [share.micro[0] for share in reader.epoch(0)] == [(5, 5), (5, 5)]
    other = take_apart(given, batch_size=7, seed=0, shuffle=True)
    assert other.order == StreamOrder(None, 7, drop_last=True)
    assert "batch size 7 instead of the DataLoader's 5" in other.notices
    assert "batch size 7 instead of the DataLoader's 5" in held(other, 0, 1).notices


def test_only_what_it_does_is_said():
    assert take_apart(Stream(), batch_size=4, seed=0, shuffle=False).notices == [
        "Stream is a stream: every rank reads all of it and keeps its share"
    ]


def test_a_length_serves_to_show_progress_only():
    class Wrong(Sized):
        def __len__(self):
            return 100

    assert (loader(Stream()).steps(0), loader(Sized()).steps(0), loader(Wrong()).steps(0)) == (None, 4, 25)
    assert len(batches(loader(Wrong()))) == 4
    dropped = DataLoader(Sized(), batch_size=4, drop_last=True)
    assert loader(dropped, batch_size=None).steps(0) == 3


def test_a_stream_sees_no_worker_in_the_rank_s_own_process():
    class Asks(IterableDataset):
        def __iter__(self):
            yield 0 if get_worker_info() is None else 1

    assert batches(loader(Asks(), collate=lambda items: [torch.tensor(items)]))[0][3] == [[0]]


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_stream_without_a_batch_is_an_error(drop_last):
    data = DataLoader(Stream(3 if drop_last else 0), batch_size=4, drop_last=drop_last)
    with pytest.raises(DataError, match="3 items, for batches of 4" if drop_last else "Stream gave no item"):
        next(loader(data, batch_size=None).epoch(0))


def test_a_stream_that_is_used_up_is_named_with_the_epoch():
    class Once(IterableDataset):
        def __init__(self):
            self.inner = iter(range(5))

        def __iter__(self):
            return self.inner

    reader = loader(Once())
    assert [share.total for share in reader.epoch(0)] == [4, 1]
    with pytest.raises(DataError, match=r"in epoch 2, Once gave no item.*anew each time"):
        list(reader.epoch(1))


def test_an_error_of_the_stream_comes_out_as_it_is():
    class Broken(IterableDataset):
        def __iter__(self):
            yield from range(6)
            raise KeyError("item 6")

    shares = loader(Broken()).epoch(0)
    assert next(shares).total == 4
    with pytest.raises(KeyError, match="item 6"):
        next(shares)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ((i for i in range(3)), "iterator"),
        (iter([1]), "iterator"),
        (zip([1], [2], strict=True), "iterator"),
        ({1, 2}, "no order"),
        (DataLoader(Stream(), batch_size=None), "batch_size=None"),
    ],
)
def test_what_cannot_be_read_again_or_has_no_order_is_refused(data, text):
    with pytest.raises(UsageError, match=text):
        take_apart(data, batch_size=None, seed=0, shuffle=True)


def test_the_first_batches_can_be_held_as_a_list():
    parts = take_apart(Drawn(), batch_size=4, seed=0, shuffle=True)
    kept = held(parts, 0, 2)
    assert (kept.order.samples, kept.order.steps(0)) == (8, 2)
    expected = [row for *_, content in batches(loader(Drawn()))[:2] for row in zip(*content, strict=True)]
    assert list(kept.dataset) == expected
    assert held(kept, 0, 1) is kept
    with pytest.raises(DataError, match="no item"):
        held(take_apart(Stream(0), batch_size=4, seed=0, shuffle=True), 0, 2)
