"""Copies of data: what they leave alone, what they share, and what they refuse."""

import io
import math
import mmap
import multiprocessing
import queue
import sqlite3
import threading
import weakref
import zipfile

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from kway.data.own_copy import FromTheStart, own_copy
from kway.errors import UsageError

X = torch.arange(32.0).view(8, 4)


class Counts(Dataset):
    """Counts how often it is asked, draws, and knows a module."""

    def __init__(self, values=X):
        self.values, self.asked, self.draws, self.module = values, 0, torch.Generator().manual_seed(3), math

    def __len__(self):
        return len(self.values)

    def __getitem__(self, place):
        self.asked += 1
        return self.values[place] + torch.rand(1, generator=self.draws), self.asked


class Once(IterableDataset):
    def __init__(self):
        self.items = iter(range(5))

    def __iter__(self):
        return self.items


def test_a_data_set_that_counts_and_draws_stays_where_it_is():
    own = Counts()
    _ = own[0]
    made = own_copy(own)
    first = made[1]
    assert (own.asked, made.asked) == (1, 2)
    assert made.values.data_ptr() != own.values.data_ptr()
    assert made.module is math
    assert torch.equal(own[1][0], first[0])


def test_a_loader_is_copied_with_all_that_hangs_on_it():
    class Collate:
        asked = 0

        def __call__(self, samples):
            self.asked += 1
            return torch.stack([value for value, _ in samples])

    loader = DataLoader(Counts(), batch_size=4, shuffle=True, collate_fn=Collate())
    made = own_copy(loader)
    assert made.sampler.data_source is made.dataset
    assert len([*made]) == 2
    assert (loader.dataset.asked, loader.collate_fn.asked) == (0, 0)
    assert (made.dataset.asked, made.collate_fn.asked, made.batch_size) == (8, 2, 4)


@pytest.mark.parametrize("data", [X, (X, X), {"x": X}, torch.utils.data.TensorDataset(X), [(X[0], 1)] * 3])
def test_what_lies_in_memory_is_nobodys_to_copy(data):
    assert own_copy(data, room=0) is data
    assert own_copy(DataLoader(data if not isinstance(data, dict) else [1]), room=0).dataset is not None


def test_mapped_files_are_shared_and_what_can_be_written_is_not(tmp_path):
    np.save(tmp_path / "x.npy", X.numpy())
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    own = Counts(mapped[2:])
    assert own_copy(own, room=0).values is own.values
    written = Counts(np.load(tmp_path / "x.npy", mmap_mode="r+"))
    assert own_copy(written).values is not written.values


def test_a_copy_that_does_not_fit_is_refused_with_both_sizes():
    # Two views of one storage take it once.
    both = Counts(X)
    both.other = X[4:]
    assert own_copy(both, room=X.nbytes).other.shape == (4, 4)
    with pytest.raises(UsageError, match=r"data of type Counts with 128 B in memory, where 127 B are left"):
        own_copy(both, room=X.nbytes - 1)


def test_what_cannot_be_copied_is_one_line_with_the_reason():
    own = Counts()
    own.rows = (row for row in X)

    class Traceless(Counts):
        def __deepcopy__(self, memo):
            return self

    traceless = Traceless()
    traceless.rows = own.rows
    assert own_copy(traceless) is traceless
    with pytest.raises(
        UsageError, match=r"data of type Counts that cannot be copied \(.*generator.*name the strategy"
    ):
        own_copy(own)


class Reads(Dataset):
    """Counts how often it is asked, and reads samples by what it was given."""

    def __init__(self, handle, read):
        self.handle, self.read, self.asked = handle, read, 0

    def __len__(self):
        return 4

    def __getitem__(self, place):
        self.asked += 1
        return self.read(self.handle, place)


class Dataset5:
    """Refuses as HDF5 files do, and is of the module that those are of."""

    def __getnewargs__(self):
        raise TypeError("h5py objects cannot be pickled")

    def __getitem__(self, place):
        return f"row {place}"


Dataset5.__module__, Dataset5.__name__ = "h5py._hl.dataset", "Dataset"


@pytest.fixture
def lines(tmp_path):
    path = tmp_path / "lines.txt"
    path.write_text("".join(f"row {place}\n" for place in range(4)))
    return path


def from_archive(archive, place):
    return archive.read(str(place)).decode()


def from_place(file, place):
    file.seek(6 * place)
    return file.readline().decode().rstrip()


def from_table(connection, place):
    return connection.execute("select text from rows where place = ?", (place,)).fetchone()[0]


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize(
    "kind", ["lock", "rlock", "lock of processes", "hdf5", "table", "archive", "bytes", "raw"]
)
def test_data_that_hold_something_open_are_copied_but_for_that(kind, wrapped, lines, tmp_path):
    if kind == "archive":
        with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
            for place in range(4):
                archive.writestr(str(place), f"row {place}")
    table = sqlite3.connect(":memory:")
    table.execute("create table rows (place, text)")
    table.executemany("insert into rows values (?, ?)", [(place, f"row {place}") for place in range(4)])
    handle, read = {
        "lock": lambda: (threading.Lock(), lambda lock, place: f"row {place}"),
        "rlock": lambda: (threading.RLock(), lambda lock, place: f"row {place}"),
        "lock of processes": lambda: (multiprocessing.Lock(), lambda lock, place: f"row {place}"),
        "hdf5": lambda: (Dataset5(), lambda rows, place: rows[place]),
        "table": lambda: (table, from_table),
        "archive": lambda: (zipfile.ZipFile(tmp_path / "a.zip"), from_archive),
        "bytes": lambda: (lines.open("rb"), from_place),
        "raw": lambda: (lines.open("rb", buffering=0), from_place),
    }[kind]()
    own = Reads(handle, read)
    data = DataLoader(own, batch_size=2) if wrapped else own
    made = own_copy(data)
    made = made.dataset if wrapped else made
    assert [made[place] for place in (3, 1)] == ["row 3", "row 1"]
    assert (own.asked, made.asked) == (0, 2)
    if kind in ("bytes", "raw"):
        assert handle.tell() == 0
        assert made.handle.name == handle.name
    assert [own[place] for place in (2, 0)] == ["row 2", "row 0"]
    made = None
    assert own[1] == "row 1"


def test_a_file_that_is_read_from_where_it_stands_is_so_on_the_copy(lines):
    class Lines(IterableDataset):
        def __init__(self):
            self.file = lines.open("rb")

        def __iter__(self):
            return iter(self.file)

    own = Lines()
    own.file.readline()
    lines.rename(lines.with_suffix(".moved"))
    lines.write_text("another\n" * 4)
    assert [*own_copy(own)] == [b"row 1\n", b"row 2\n", b"row 3\n"]
    assert own.file.readline() == b"row 1\n"


def test_what_hands_out_one_thing_after_the_other_is_refused(lines):
    table = sqlite3.connect(":memory:")
    # Of a text file nobody can tell where it would be cut into lines if it were opened anew (``newline``).
    with lines.open("r+b") as written, lines.open(newline="") as text:
        for handle in ((row for row in X), table.execute("select 1"), written, text):
            with pytest.raises(UsageError, match="cannot be copied"):
                own_copy(Reads(handle, None))


def test_arrays_of_an_archive_are_opened_anew(tmp_path):
    np.savez(tmp_path / "arrays.npz", x=X)
    with np.load(tmp_path / "arrays.npz") as arrays:
        own = Reads(arrays, lambda arrays, place: arrays["x"][place])
        made = own_copy(own)
        assert made.handle is not arrays
        assert np.array_equal(made[2], X[2])
        assert np.array_equal(made.handle.f.x, X)
        made = None
        assert np.array_equal(own[1], X[1])
    arrays = np.load(io.BytesIO((tmp_path / "arrays.npz").read_bytes()))
    with arrays, pytest.raises(UsageError, match="data of type Reads that cannot be copied"):
        own_copy(Reads(arrays, None))


def test_what_raises_when_its_class_is_asked_for_is_one_line():
    gone = weakref.proxy(Reads(None, None))
    with pytest.raises(UsageError, match=r"cannot be copied \(ReferenceError"):
        own_copy(Reads(gone, None))


class Refuses(Dataset):
    """Cannot be copied, and counts."""

    asked = 0

    def __getstate__(self):
        raise TypeError("no copy of this")

    def __getitem__(self, place):
        self.asked += 1
        return X[place]


class Table(sqlite3.Connection):
    """A connection that may count."""


@pytest.mark.parametrize(
    "make",
    [
        Refuses,
        lambda: Reads(Refuses(), None),
        lambda: DataLoader(Refuses()),
        Dataset5,
        lambda: Reads(multiprocessing.Value("i", 0), None),
        lambda: Reads(queue.SimpleQueue(), None),
        lambda: Reads(threading.local(), None),
        lambda: Reads(mmap.mmap(-1, 8), None),
        lambda: Reads(sqlite3.connect(":memory:", factory=Table), None),
    ],
)
def test_what_may_keep_a_state_is_never_shared(make):
    with pytest.raises(UsageError, match="cannot be copied"):
        own_copy(make())


def test_each_pass_over_a_stream_begins_where_the_stream_is():
    own = Once()
    assert next(own.items) == 0
    stream = FromTheStart(own)
    assert [[*stream], [*stream]] == [[1, 2, 3, 4]] * 2
    assert [*own] == [1, 2, 3, 4]


def test_a_stream_is_told_its_epoch_on_the_copy():
    class Told(IterableDataset):
        epoch = -1

        def set_epoch(self, epoch):
            self.epoch = epoch

        def __iter__(self):
            return iter([self.epoch])

    own = Told()
    stream = FromTheStart(own)
    stream.set_epoch(4)
    assert ([*stream], own.epoch) == ([4], -1)
