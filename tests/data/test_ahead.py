"""Batches on their way to a device, with a double of its side stream that does nothing until it is made to.

What is copied too early, or from memory that was written again too early, has wrong values in the end.
"""

from collections import namedtuple
from dataclasses import dataclass
from itertools import count

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from kway.data.ahead import BACKLOG, DEPTH, Lane, ahead
from kway.data.loader import Loader
from kway.data.parts import take_apart

Pair = namedtuple("Pair", "image label")


@dataclass
class Graph:
    nodes: torch.Tensor
    name: str


class Mark:
    def __init__(self, side, place):
        self.side, self.place = side, place

    def synchronize(self):
        self.side.run(self.place)


class Reached:
    def __init__(self):
        self.waited = False

    def synchronize(self):
        self.waited = True


class LazySide:
    """Copies when it must. ``produce[tensor]`` computes a tensor that does not lie on the host."""

    def __init__(self, pins=True):
        self.pins, self.pinned_sizes = pins, []
        self.todo, self.done = [], 0
        self.produce, self.made, self.kept, self.awaited = {}, set(), [], []
        self.handed_out = []

    def run(self, until=None):
        until = len(self.todo) if until is None else until
        while self.done < until:
            self.todo[self.done]()
            self.done += 1

    def takes(self, source):
        return source.layout is torch.strided and source.data_ptr() not in self.made

    def is_on_host(self, source):
        return id(source) not in self.produce

    def wait_for_producer(self, source):
        self.todo.append(self.produce[id(source)])

    def empty_like(self, source):
        found = torch.empty_like(source).fill_(77)
        self.made.add(found.data_ptr())
        return found

    def copy(self, to, source):
        self.todo.append(lambda: to.copy_(source))

    def pinned(self, size):
        if not self.pins:
            raise RuntimeError("no memory can be pinned")
        self.pinned_sizes.append(size)
        return torch.empty(size, dtype=torch.uint8)

    def mark(self):
        return Mark(self, len(self.todo))

    def reached(self):
        self.handed_out.append(Reached())
        return self.handed_out[-1]

    def arrived(self, mark, tensors):
        self.awaited.append(mark.place)
        self.kept.append(tensors)


def through(items, depth=DEPTH, **options):
    """Take all items through a lane, and only then let the side stream come to its end."""
    side = LazySide(**options)
    found = list(ahead(iter(items), Lane(side, depth + 1), depth))
    side.run()
    return side, found


@pytest.mark.parametrize("pins", [True, False])
@pytest.mark.parametrize("depth", [1, 2, 5])
@pytest.mark.parametrize("length", [0, 1, 2, 3, 20])
def test_items_come_in_order_with_their_values(length, depth, pins):
    items = [(torch.full((3, 2), float(n)), torch.tensor([n])) for n in range(length)]
    side, found = through(items, depth, pins=pins)
    assert [(x.tolist(), y.tolist()) for x, y in found] == [(x.tolist(), y.tolist()) for x, y in items]
    # All that computes with an item was told to wait for its copies, and its memory is kept until then.
    assert side.awaited == [2 * (n + 1) for n in range(length)]
    assert [[t.data_ptr() for t in kept] for kept in side.kept] == [
        [x.data_ptr(), y.data_ptr()] for x, y in found
    ]


def test_pinned_memory_is_used_again_and_grows_only_where_it_must():
    side, _ = through([(torch.zeros(64), torch.zeros(2)) for _ in range(50)])
    assert side.pinned_sizes == [256, 8] * (DEPTH + 1)
    sizes = [100, 90, 80, 120, 130, 20]  # slot 0 holds 100 and 120 (512 bytes), slot 1 holds 90 and 130, ...
    side, found = through([torch.arange(float(n)) for n in sizes])
    assert side.pinned_sizes == [512, 512, 512, 1024]
    assert [x.tolist() for x in found] == [list(map(float, range(n))) for n in sizes]


@pytest.mark.parametrize("pinned", [True, False])
def test_a_data_set_may_fill_the_same_memory_again(pinned, monkeypatch):
    # Also where the device could read it by itself: it is written again before the device gets there.
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: pinned)
    memory = torch.zeros(3)
    _, found = through(memory.fill_(n) for n in range(6))
    assert [x.tolist() for x in found] == [[float(n)] * 3 for n in range(6)]


def test_two_more_are_under_way_when_one_is_handed_out():
    read, side = [], LazySide()

    def items():
        for n in range(6):
            read.append(n)
            yield torch.tensor([n])

    found = ahead(items(), Lane(side))
    assert read == []
    seen = [(next(found).numel(), len(read), len(side.todo), len(side.awaited)) for _ in range(6)]
    assert seen == [(1, 3, 3, 1), (1, 4, 4, 2), (1, 5, 5, 3), (1, 6, 6, 4), (1, 6, 6, 5), (1, 6, 6, 6)]
    # The host waited for the copies of an item only where its memory was written again.
    assert side.done == 3


def test_the_host_is_no_more_than_some_batches_ahead_of_what_computes():
    side = LazySide()
    for number, _ in enumerate(ahead((torch.tensor([n]) for n in range(30)), Lane(side))):
        waited = [mark.waited for mark in side.handed_out]
        assert waited == [True] * max(0, number + 1 - BACKLOG) + [False] * min(number + 1, BACKLOG)


def test_a_copy_waits_for_what_produces_its_source():
    side = LazySide()

    def late(n):
        source = torch.zeros(4)
        side.produce[id(source)] = lambda: source.fill_(n)
        kept.append(source)
        return source

    kept = []
    found = list(ahead(((late(n), torch.tensor([n])) for n in range(1, 6)), Lane(side)))
    side.run()
    assert [(x.tolist(), y.tolist()) for x, y in found] == [([float(n)] * 4, [n]) for n in range(1, 6)]


def test_structures_and_what_is_no_plain_tensor():
    sparse, there = torch.eye(3).to_sparse(), torch.ones(2)
    image = torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last)
    item = {
        "pair": Pair(image, [torch.tensor([True]), None, "text"]),
        "graph": Graph(torch.rand(3, 4).t(), "name"),
        "sparse": sparse,
        "none": torch.zeros(0, 7),
        "half": torch.rand(3)[::2].bfloat16(),
        "strided": torch.arange(10)[::3],
        "there": there,
    }
    side = LazySide()
    side.made.add(there.data_ptr())
    (found,) = ahead(iter([item]), Lane(side))
    side.run()
    assert type(found["pair"]) is Pair
    assert found["pair"].image.stride() == image.stride()
    assert torch.equal(found["pair"].image, image)
    assert found["pair"].image is not image
    assert found["pair"].label[0].tolist() == [True]
    assert found["pair"].label[1:] == [None, "text"]
    assert (found["graph"].name, found["graph"].nodes.stride()) == ("name", (1, 4))
    assert torch.equal(found["graph"].nodes, item["graph"].nodes)
    assert found["sparse"] is sparse
    assert found["there"] is there
    assert found["none"].shape == (0, 7)
    assert torch.equal(found["half"], item["half"])
    assert found["strided"].tolist() == [0, 3, 6, 9]


def test_an_error_comes_behind_the_items_before_it():
    def items():
        yield from (torch.tensor([n]) for n in range(2))
        raise KeyError("sample 2")

    seen = []
    with pytest.raises(KeyError, match="sample 2") as caught:
        seen.extend(ahead(items(), Lane(LazySide())))
    assert len(seen) == 2
    assert "items" in [entry.name for entry in caught.traceback]


@pytest.mark.parametrize("taken", [0, 1, 4])
def test_an_epoch_that_is_left_closes_what_it_reads(taken):
    closed = []

    def items():
        try:
            yield from (torch.tensor([n]) for n in count())
        finally:
            closed.append(True)

    source = items()
    found = ahead(source, Lane(LazySide()))
    for _ in range(taken):
        next(found)
    found.close()
    assert closed == [True] * (taken > 0)
    source.close()


def test_interrupts_are_not_put_off():
    def items():
        yield torch.zeros(1)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        next(ahead(items(), Lane(LazySide())))


class Rows(Dataset):
    def __len__(self):
        return 21

    def __getitem__(self, index):
        if index == 18:
            raise ValueError("sample 18")
        return torch.full((2,), float(index)), index


class Stream(IterableDataset):
    def __init__(self):
        self.read = 0

    def __iter__(self):
        for n in range(10):
            self.read += 1
            yield torch.tensor([n])
        self.read += 100


def loader(data, lane=None, compare=lambda number: [number], **more):
    made = Loader(
        take_apart(data, batch_size=4, seed=0, shuffle=False, **more), rank=0, size=1, seed=0, compare=compare
    )
    made._lane = lane
    return made


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_gives_what_the_host_reads_and_raises_at_the_same_step(workers):
    side, seen = LazySide(), []
    reader = loader(Rows(), Lane(side), workers=workers)
    with pytest.raises(ValueError, match="sample 18"):
        seen.extend(reader.epoch(0))
    side.run()
    reader.close()
    assert [share.step for share in seen] == [0, 1, 2, 3]
    assert [share.micro[0][0][0][:, 0].tolist() for share in seen] == [
        share.indices.tolist() for share in seen
    ]
    assert all(share.micro[0][0][1].data_ptr() in side.made for share in seen)


def test_ranks_compare_a_stream_when_its_step_comes_and_it_ends_once():
    stream, compared = Stream(), []
    side = LazySide()
    reader = loader(stream, Lane(side), lambda number: compared.append(number) or [number])
    counts = [(share.count, len(compared), stream.read) for share in reader.epoch(0)]
    assert counts == [(4, 1, 110), (4, 2, 110), (2, 3, 110)]
    assert len(compared) == 4
    again = list(reader.epoch(1))
    side.run()
    assert torch.cat([share.micro[0][0] for share in again]).flatten().tolist() == list(range(10))
