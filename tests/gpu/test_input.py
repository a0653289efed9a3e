"""Input on a GPU: the same bits as by way of the host, and a device that does not wait for it."""

import time
from collections import namedtuple
from functools import partial

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

import kway
from kway.data.arrays import Selection
from kway.data.images import Images
from kway.data.loader import Loader
from kway.data.parts import take_apart
from kway.step.outcome import Outcome
from kway.training.requests import LAG, Requests
from kway.zoo import get

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda:0")
Pair = namedtuple("Pair", "image label")


def images(count=3000):
    draw = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (count, 1, 28, 28), dtype=torch.uint8, generator=draw)
    return Images("drawn", pixels, torch.arange(count) % 10, 10)


class Rows(Dataset):
    """Samples one by one, of several kinds; ``slow``: seconds that each takes."""

    def __init__(self, slow=0.0):
        self.slow = slow

    def __len__(self):
        return 130

    def __getitem__(self, index):
        time.sleep(self.slow)
        x = torch.full((50, 7), float(index)) + torch.arange(7)
        return {"pair": Pair(x, index), "empty": torch.zeros(0), "name": str(index)}


class Stream(IterableDataset):
    def __iter__(self):
        for index in range(130):
            yield torch.full((9,), index), torch.tensor(index % 2 == 0)


class OnDevice(Dataset):
    """Samples that are computed on the GPU."""

    def __len__(self):
        return 60

    def __getitem__(self, index):
        return torch.full((300, 300), float(index), device=GPU).mul_(2)


def shares(data, device, epoch=1, start=0, **how):
    more = {"workers": how.pop("workers", None), "batch_size": how.pop("batch_size", 16)}
    cut = {"rank": 0, "size": 1, "micro_batch": None, **how}
    parts = take_apart(data, seed=3, shuffle=True, **more)
    reader = Loader(parts, seed=3, **cut, device=device)
    try:
        yield reader
        yield from reader.epoch(epoch, start)
    finally:
        reader.close()


def leaves(value):
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in leaves(item)]
    if isinstance(value, tuple | list):
        return [leaf for item in value for leaf in leaves(item)]
    return [value]


def assert_same(data, placement, **how):
    there, host = shares(data, GPU, **how), shares(data, torch.device("cpu"), **how)
    reader, _ = next(there), next(host)
    seen = 0
    for one, other in zip(host, there, strict=True):
        seen += 1
        assert (one.count, one.total, one.step) == (other.count, other.total, other.step)
        assert one.indices.tolist() == other.indices.tolist()
        for (a, counted), (b, also) in zip(one.micro, other.micro, strict=True):
            assert counted == also
            for left, right in zip(leaves(a), leaves(b), strict=True):
                if not isinstance(left, torch.Tensor):
                    assert left == right
                    continue
                assert right.device == GPU
                assert (left.dtype, left.shape) == (right.dtype, right.shape)
                assert len(left) < 2 or not left.numel() or left.stride() == right.stride()
                assert torch.equal(left, right.cpu() if left.device.type == "cpu" else right)
    assert seen
    assert placement in reader.placement


LAST = torch.randn(300, 4, 6, 6, generator=torch.Generator().manual_seed(1)).to(
    memory_format=torch.channels_last
)


@pytest.mark.parametrize(
    "data",
    [
        images,
        lambda: Selection(images(), torch.arange(0, 3000, 7).numpy()),
        lambda: (LAST, LAST.transpose(1, 3), LAST[:, ::2], torch.arange(300).numpy()),
        lambda: {"x": LAST.to(GPU), "label": torch.arange(300) % 3},
        lambda: torch.arange(100, dtype=torch.bfloat16).view(100, 1),
    ],
    ids=["images", "selection", "strided", "there", "few"],
)
@pytest.mark.parametrize(
    "how",
    [{}, {"start": 2}, {"rank": 2, "size": 3, "micro_batch": 3}, {"shards": 8, "rank": 1, "size": 3},
     {"batch_size": 256}],
)  # fmt: skip
def test_data_that_stays_on_the_gpu_gives_what_the_host_reads(data, how):
    assert_same(data(), "stays on cuda:0", **how)


@pytest.mark.parametrize(
    ("data", "how"),
    [
        (Rows(), {}),
        (Rows(), {"workers": 2}),
        (Rows(), {"rank": 2, "size": 3, "micro_batch": 3, "start": 1}),
        (Rows(), {"shards": 8, "rank": 1, "size": 3}),
        (Stream(), {}),
        (Stream(), {"workers": 1}),
        (DataLoader(Rows(), batch_size=16, pin_memory=True), {"batch_size": None}),
        (OnDevice(), {}),
    ],
)
def test_batches_copied_ahead_are_what_the_host_reads(data, how):
    assert_same(data, "copied to cuda:0 ahead", **how)


def test_all_pixels_are_divided_as_on_the_host():
    pixels = torch.arange(256).to(torch.uint8).view(256, 1, 1, 1)
    assert_same(Images("all", pixels, torch.zeros(256).long(), 1), "stays", batch_size=256)


def test_data_that_does_not_fit_a_quarter_is_copied_ahead(monkeypatch):
    data = torch.arange(1000.0)
    needed = 1000 * (4 + 8)
    for free, placement in ((4 * needed, "stays"), (4 * needed - 1, "ahead")):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_, free=free: (free, free))
        assert_same(data, placement)


def test_memory_of_a_batch_is_not_given_away_while_it_is_read():
    # Each batch is read late, behind a long computation, after many later ones were copied.
    class Big(Dataset):
        def __len__(self):
            return 64

        def __getitem__(self, index):
            return torch.full((1 << 18,), float(index))

    reader = Loader(
        take_apart(Big(), batch_size=4, seed=0, shuffle=False), rank=0, size=1, seed=0, device=GPU
    )
    busy, sums = torch.randn(4096, 4096, device=GPU), []
    for share in reader.epoch(0):
        for _ in range(3):
            busy = (busy @ busy).clamp_(-1, 1)
        sums.append(share.micro[0][0].mean(dim=1))
        del share
    assert torch.cat(sums).tolist() == [float(index) for index in range(64)]


def test_nothing_makes_the_host_wait(monkeypatch):
    data = (torch.randn(6400, 128), torch.arange(6400))
    reader = Loader(take_apart(data, batch_size=64, seed=0, shuffle=True), rank=0, size=1, seed=0, device=GPU)
    epoch = reader.epoch(0)
    next(epoch)  # the order of the epoch is worked out with the first batch, which may wait
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert sum(share.count for share in epoch) == 6400 - 64
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_what_ranks_ask_comes_back_some_steps_later():
    requests = Requests(GPU)
    zero, found = torch.zeros((), device=GPU), []
    for step in range(1, 6 * LAG + 1):
        asked = torch.zeros(3, device=GPU)
        # One rank asks for something from here on, until it is done.
        asked[1] = float(step > LAG + 1)
        found.append(requests.after(Outcome(zero, zero, zero, asked), 0))
    # Looked at in step 2 LAG, heard LAG steps later.
    assert [step for step, what in enumerate(found, 1) if what] == [3 * LAG, 4 * LAG, 5 * LAG, 6 * LAG]


def job(data, **more):
    return kway.Job(
        model=partial(get("lenet"), (1, 28, 28), 10),
        loss=torch.nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.SGD, lr=0.01),
        data=data,
        **{"batch_size": 256, **more},
    )


def test_lenet_does_not_wait_for_its_data():
    data = images(60000)
    kway.train(job(data), epochs=1, devices="cuda:0")  # loads kernels
    record = kway.train(job(data), epochs=3, devices="cuda:0").record
    assert record.input_wait_s < 0.15 * sum(row["seconds"] for row in record.epochs)
    assert record.measured_step_s is not None


class SlowImages(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        time.sleep(0.01)
        return torch.full((1, 28, 28), index / 64), index % 10


def test_a_slow_data_set_counts_as_waiting():
    record = kway.train(job(SlowImages(), batch_size=8), epochs=1, devices="cuda:0").record
    # 0.64 s of reading; next to none of it while a step of a millisecond is under way.
    assert record.input_wait_s > 0.4
