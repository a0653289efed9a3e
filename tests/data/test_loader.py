import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from kway.data.loader import Loader, cut
from kway.data.parts import take_apart
from kway.data.placed import place
from kway.errors import DataError, UsageError

X, Y = torch.arange(26.0).view(13, 2), torch.arange(13)


class Drawn(Dataset):
    """Each sample draws from all three generators."""

    def __init__(self, samples=13):
        self.samples = samples

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        return index, int(torch.randint(2**40, ())), int(np.random.randint(2**40)), random.getrandbits(40)


def loader(data, rank=0, size=1, batch_size=8, shuffle=True, seed=0, **more):
    micro_batch = more.pop("micro_batch", None)
    parts = take_apart(data, batch_size=batch_size, seed=seed, shuffle=shuffle, **more)
    return Loader(parts, rank=rank, size=size, seed=seed, micro_batch=micro_batch)


@pytest.mark.parametrize("data", [(X, Y), Drawn()])
@pytest.mark.parametrize("size", [1, 2, 3, 8, 16])
def test_shares_are_the_balanced_parts_of_the_batch_of_one_device(data, size):
    alone = list(loader(data).epoch(1))
    ranks = [list(loader(data, rank, size).epoch(1)) for rank in range(size)]
    for step, whole in enumerate(alone):
        shares = [rank[step] for rank in ranks]
        counts = [share.count for share in shares]
        assert sum(counts) == whole.count == whole.total == shares[-1].total
        assert max(counts) - min(counts) <= 1
        assert np.concatenate([share.indices for share in shares]).tolist() == whole.indices.tolist()
        for share in shares:
            ((batch, counted),) = share.micro
            assert counted == share.count == len(share.indices)
            assert len(batch[0]) == max(1, share.count)


def test_a_rank_without_samples_holds_one_real_sample_that_does_not_count():
    share = next(loader((X, Y), 2, 3, batch_size=2, shuffle=False).epoch(0))
    assert (share.count, share.total, share.indices.tolist()) == (0, 2, [])
    ((x, y), counted) = share.micro[0]
    assert (counted, y.tolist()) == (0, [0])
    assert torch.equal(x, X[:1])


def test_evaluation_counts_every_sample_once_in_data_set_order():
    for size in (1, 2, 3):
        ranks = [
            list(loader((X, Y), rank, size, batch_size=4, shuffle=False).epoch(0)) for rank in range(size)
        ]
        seen = [i for shares in zip(*ranks, strict=True) for share in shares for i in share.indices.tolist()]
        assert seen == list(range(13))


@pytest.mark.parametrize("size", [1, 2, 3, 9])
@pytest.mark.parametrize("micro_batch", [1, 2, 3, 8, 100])
def test_micro_batches_are_equally_many_on_every_rank(size, micro_batch):
    ranks = [list(loader((X, Y), r, size, micro_batch=micro_batch).epoch(0)) for r in range(size)]
    for shares in zip(*ranks, strict=True):
        assert len({len(share.micro) for share in shares}) == 1
        for share in shares:
            counts = [counted for _, counted in share.micro]
            assert sum(counts) == share.count
            assert max(counts) <= micro_batch
            for (_, y), counted in share.micro:
                assert len(y) == max(1, counted)
            targets = [y[:counted] for (_, y), counted in share.micro]
            assert torch.cat(targets).tolist() == share.indices.tolist()


def test_an_epoch_can_start_in_the_middle():
    whole = list(loader(Drawn()).epoch(3))
    (rest,) = loader(Drawn()).epoch(3, start=1)
    assert rest.step == 1
    assert rest.indices.tolist() == whole[1].indices.tolist()
    assert torch.equal(rest.micro[0][0][1], whole[1].micro[0][0][1])


def drawn(size, epoch, seed=0):
    """What every sample drew in an epoch, by data set index."""
    found = {}
    for rank in range(size):
        for share in loader(Drawn(), rank, size, seed=seed).epoch(epoch):
            index, *values = (part.tolist() for part in share.micro[0][0])
            found |= {i: v for i, *v in zip(index, *values, strict=True) if share.count}
    return found


def test_augmentation_depends_on_seed_epoch_and_sample_only():
    alone = drawn(1, 0)
    assert drawn(2, 0) == drawn(3, 0) == alone
    streams = [value for other in (alone, drawn(1, 1), drawn(1, 0, seed=1)) for value in other.values()]
    for generator in range(3):
        assert len({values[generator] for values in streams}) == len(streams)


def test_the_random_state_of_the_process_is_left_as_it_was():
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    for share in loader(Drawn()).epoch(0):
        assert share.count
        assert torch.equal(before[0], torch.get_rng_state())
        assert before[1:] == (np.random.get_state()[1].tolist(), random.getstate())


def test_collate_draws_anew_for_every_batch():
    def collate(samples):
        return [sample[0] for sample in samples], float(torch.rand(()))

    draws = [s.micro[0][0][1] for e in range(2) for s in loader(Drawn(), collate=collate).epoch(e)]
    assert len(set(draws)) == 4


def test_cut_reads_the_same_share():
    parts = take_apart(Drawn(), batch_size=8, seed=0, shuffle=True)
    one = next(loader(Drawn(), 1, 2, micro_batch=3).epoch(2))
    other = cut(parts, parts.order.batch(2, 0), epoch=2, step=0, rank=1, size=2, seed=0, micro_batch=3)
    assert [c for _, c in one.micro] == [c for _, c in other.micro] == [2, 2]
    for (left, _), (right, _) in zip(one.micro, other.micro, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def test_an_error_of_the_data_set_comes_out_as_it_is():
    class Broken(Drawn):
        def __getitem__(self, index):
            raise KeyError(f"sample {index}")

    with pytest.raises(KeyError, match="sample 0"):
        next(loader(Broken(), shuffle=False).epoch(0))


def test_an_epoch_that_was_left_is_not_mixed_with_the_next():
    reader = loader((X, Y))
    old = reader.epoch(0)
    next(old)
    assert next(reader.epoch(1)).epoch == 1
    with pytest.raises(UsageError, match="one epoch at a time"):
        next(old)


@pytest.mark.parametrize("more", [{"rank": 2, "size": 2}, {"micro_batch": 0}])
def test_bad_numbers_are_refused(more):
    with pytest.raises(UsageError):
        loader((X, Y), **more)


def test_a_user_loader_gives_the_same_as_its_parts():
    given = DataLoader(Drawn(), batch_size=4, shuffle=False)
    shares = list(loader(given, batch_size=None).epoch(0))
    assert [share.indices.tolist() for share in shares] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12]]


@pytest.mark.parametrize("room", [True, False])
def test_a_loader_for_a_gpu_decides_once_how_batches_get_there(monkeypatch, room):
    gpu, asked, free = torch.device("cuda:0"), [], 10**9 if room else 100

    def placed(parts, device, cut, free):
        asked.append((device, free))
        return place(parts, torch.device("cpu"), cut, free)

    monkeypatch.setattr("kway.data.loader.place", placed)
    monkeypatch.setattr("kway.data.loader.CudaSide", lambda device: SimpleNamespace(device=device))
    # Nothing passes through a side that is not there.
    monkeypatch.setattr("kway.data.loader.ahead", lambda items, lane: items)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 2 * free))
    parts = take_apart((X.numpy(), Y), batch_size=8, seed=0, shuffle=True)
    reader = Loader(parts, rank=0, size=1, seed=0, device=gpu)
    assert reader.placement == "read by the host"
    for epoch in range(3):
        expected = [share.indices.tolist() for share in loader((X, Y)).epoch(epoch)]
        assert [share.indices.tolist() for share in reader.epoch(epoch)] == expected
    assert asked == [(gpu, free)]
    assert reader.placement == (
        "the data (208 B) stays on cuda:0" if room else "batches are copied to cuda:0 ahead of their step"
    )
    old = reader.epoch(3)
    next(old)
    next(reader.epoch(4))
    with pytest.raises(UsageError, match="one epoch at a time"):
        next(old)
    reader.close()
    next(reader.epoch(0))
    assert len(asked) == 2


@pytest.mark.parametrize("made", [torch.ones, lambda size: [0.0] * size])
def test_samples_of_several_sizes_are_told_what_to_do(made):
    uneven = [(made(1 + index % 3), index) for index in range(9)]
    with pytest.raises(DataError, match=r"equal size.*pass a DataLoader with a collate_fn") as caught:
        list(loader(uneven).epoch(0))
    # None of torch's own frames: they say nothing of the user's code.
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None


def test_what_a_collate_function_of_one_s_own_raises_stays_as_it_is():
    def collate(samples):
        raise RuntimeError("not of equal size, it says")

    with pytest.raises(RuntimeError, match="it says"):
        list(loader(Drawn(), collate=collate).epoch(0))
