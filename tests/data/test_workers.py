"""Loader processes. They are started, once for the whole file, by a fork server that takes two seconds."""

import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
import traceback
from multiprocessing import resource_tracker
from pathlib import Path
from typing import NamedTuple

import cloudpickle
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info
from torch.utils.data.dataloader import _BaseDataLoaderIter

from kway.data.loader import Loader
from kway.data.parcel import Failure
from kway.data.parts import take_apart
from kway.errors import KwayError, UsageError

pytestmark = pytest.mark.starts


class Drawn(Dataset):
    def __init__(self, fault=None):
        self.fault = fault or (lambda index: None)

    def __len__(self):
        return 13

    def __getitem__(self, index):
        self.fault(index)
        values = torch.randint(2**40, ()), np.random.randint(2**40), random.getrandbits(40)
        return index, *(int(value) for value in values)


class DrawnTogether(Drawn):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


@pytest.fixture(autouse=True)
def by_value():
    # What a script or notebook defines travels by value; here it stands in a file that workers cannot import.
    module = sys.modules[__name__]
    cloudpickle.register_pickle_by_value(module)
    yield
    cloudpickle.unregister_pickle_by_value(module)


def loader(data, workers, rank=0, size=1, init=None, collate=None):
    given = DataLoader(
        data, batch_size=4, shuffle=True, num_workers=workers, worker_init_fn=init, collate_fn=collate
    )
    parts = take_apart(given, batch_size=None, seed=0, shuffle=True)
    return Loader(parts, rank=rank, size=size, seed=0, micro_batch=1)


def read(reader, epochs=2):
    shares = [share for epoch in range(epochs) for share in reader.epoch(epoch)]
    return [
        (
            share.epoch,
            share.step,
            share.count,
            [[part.tolist() for part in batch] for batch, _ in share.micro],
        )
        for share in shares
    ]


def alive(pid):
    """Whether a process runs; one that ended and was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone(pids, seconds=10):
    end = time.monotonic() + seconds
    while any(alive(pid) for pid in pids) and time.monotonic() < end:
        time.sleep(0.02)
    return not any(alive(pid) for pid in pids)


@pytest.mark.parametrize(("rank", "kind"), [(0, Drawn), (1, Drawn), (1, DrawnTogether)])
def test_any_number_of_workers_reads_the_same(rank, kind):
    expected = read(loader(Drawn(), 0, rank, 2))
    for workers in (1, 2):
        reader = loader(kind(), workers, rank, 2)
        assert read(reader) == expected
        reader.close()


def test_workers_stay_for_the_next_epoch_also_when_one_was_left_and_end_at_close():
    data = Drawn()
    reader = loader(data, 2, collate=lambda samples: (torch.tensor([s[0] for s in samples]), os.getpid()))
    seen = set()
    for epoch in range(3):
        for share in reader.epoch(epoch):
            seen |= {batch[1] for batch, _ in share.micro}
            if epoch == 1:
                break
    assert len(seen) == 2
    assert os.getpid() not in seen
    reader.close()
    assert gone(seen)


def test_closed_workers_leave_no_semaphore_though_a_traceback_holds_them(monkeypatch):
    named = set()
    for name, note in (("register", named.add), ("unregister", named.discard)):
        real = getattr(resource_tracker, name)
        monkeypatch.setattr(
            resource_tracker, name, lambda *what, real=real, note=note: (note(what), real(*what))
        )

    def fault(index):
        raise KeyError(index)

    reader = loader(Drawn(fault), 1)
    with pytest.raises(KeyError) as caught:
        read(reader)
    assert named
    reader.close()
    deadline = time.monotonic() + 5  # the thread of a queue ends a moment later
    while named and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not named
    held = [value for frame, _ in traceback.walk_tb(caught.tb) for value in frame.f_locals.values()]
    assert any(isinstance(value, _BaseDataLoaderIter) for value in held)


def test_a_batch_of_a_class_that_only_the_user_s_code_knows_comes_back_as_that_class():
    class Pair(NamedTuple):
        x: torch.Tensor
        y: int

    class Pairs(Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            return Pair(torch.full((2,), float(index)), index)

    parts = take_apart(
        DataLoader(Pairs(), batch_size=2, num_workers=1), batch_size=None, seed=0, shuffle=False
    )
    loader = Loader(parts, rank=0, size=1, seed=0)
    try:
        batches = [share.micro[0][0] for share in loader.epoch(0)]
    finally:
        loader.close()
    assert all(isinstance(batch, Pair) for batch in batches)
    assert [batch.y.tolist() for batch in batches] == [[0, 1], [2, 3]]


def test_an_error_keeps_its_type_and_traceback():
    class StrangeError(Exception):
        def __init__(self, one, two):
            super().__init__(one + two)

    def fault(index):
        raise StrangeError("sam", "ple") if index == 5 else KeyError(index)

    for index, kind in ((5, RuntimeError), (6, KeyError)):
        data = Drawn(lambda i, index=index: fault(index) if i == index else None)
        reader = loader(data, 1)
        with pytest.raises(kind) as caught:
            read(reader)
        assert "in loader worker 0, epoch 0, step" in caught.value.__notes__[0]
        assert f'File "{__file__}", line' in caught.value.__notes__[0]
        assert "in fault" in caught.value.__notes__[0]
        reader.close()
        if kind is RuntimeError:  # an exception that cannot be made again from its arguments
            assert str(caught.value) == "StrangeError: sample"


def test_the_user_s_worker_init_is_called_with_the_data_set_in_place():
    def init(worker):
        get_worker_info().dataset.fault = lambda index, worker=worker: known.append(worker)

    known = []

    def collate(samples):
        return get_worker_info().dataset.fault.__defaults__[0]

    reader = loader(Drawn(), 2, init=init, collate=collate)
    answers = {batch for share in reader.epoch(0) for batch, _ in share.micro}
    reader.close()
    assert answers == {0, 1}


@pytest.mark.parametrize(
    ("die", "words"),
    [
        (
            lambda index: os.kill(os.getpid(), signal.SIGKILL),
            ["was killed by SIGKILL: often: the machine ran out"],
        ),
        (lambda index: os._exit(3), ["left with exit code 3"]),
        (
            lambda index: os.kill(os.getpid(), signal.SIGBUS),
            ["was killed by SIGBUS", "/dev/shm holds", "MiB are free; make it larger (docker run --shm-size"],
        ),
    ],
    ids=["kill", "exit", "bus error"],
)
def test_a_worker_that_dies_is_named_with_rank_and_cause(die, words):
    def fault(index):
        if get_worker_info().id == 1:
            die(index)

    reader = loader(Drawn(fault), 2, rank=1, size=2)
    with pytest.raises(KwayError, match=r"loader worker 1 of rank 1 \(process \d+\)") as caught:
        read(reader)
    assert all(word in str(caught.value) for word in words), caught.value
    reader.close()


def test_a_batch_that_finds_no_shared_memory_is_an_error_and_no_wait():
    def init(worker):
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))  # files in shared memory are files, too

    def collate(samples):
        return torch.zeros(1 << 20)

    reader = loader(Drawn(), 1, rank=1, size=2, init=init, collate=collate)
    with pytest.raises(KwayError, match="loader worker 0, epoch 0, step 0 of rank 1 found no room") as caught:
        read(reader)
    assert "/dev/shm holds" in str(caught.value)
    assert "File too large" in str(caught.value.__cause__)
    reader.close()


def test_a_batch_that_cannot_be_sent_is_an_error_and_no_wait():
    reader = loader(Drawn(), 1, collate=lambda samples: threading.Lock())
    with pytest.raises(TypeError, match="cannot pickle") as caught:
        read(reader)
    assert "in loader worker 0, epoch 0, step 0" in caught.value.__notes__[0]
    reader.close()


def test_data_that_cannot_be_sent_is_refused():
    data = Drawn()
    data.lock = threading.Lock()
    with pytest.raises(UsageError, match=r"Drawn cannot be sent to loader workers.*workers=0"):
        read(loader(data, 1))


SCRIPT = """
import os, sys, time, torch
from kway.data.loader import Loader
from kway.data.parts import take_apart

class Mine(torch.utils.data.Dataset):
    scale = lambda self, index: index * 2
    def __len__(self): return 8
    def __getitem__(self, index): return self.scale(index)

collate = lambda samples: (samples, os.getpid(), os.getppid())
parts = take_apart(Mine(), batch_size=4, seed=0, shuffle=False, workers=2, collate=collate)
loader = Loader(parts, rank=0, size=1, seed=0)
found = [share.micro[0][0] for share in loader.epoch(0)]
assert [s for samples, *_ in found for s in samples] == list(range(0, 16, 2))
print(*{pid for _, *pids in found for pid in pids}, flush=True)
if sys.argv[-1] == "wait": time.sleep(60)
"""


@pytest.mark.parametrize("way", ["file", "-c"])
def test_a_script_without_guard_runs_once(tmp_path, way, request):
    if way == "-c":  # what is started as a user starts it is the file
        request.getfixturevalue("forked_commands")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script)] if way == "file" else [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 3  # two workers and the fork server; the script printed once
    assert gone(pids)


@pytest.mark.usefixtures("forked_commands")
@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_survives_the_rank(ending):
    quiet = "from kway.launch.semaphores import cleared_quietly; cleared_quietly()"
    with subprocess.Popen(
        [sys.executable, "-c", quiet + SCRIPT, "wait"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as rank:
        pids = [int(pid) for pid in rank.stdout.readline().split()]
        assert len(pids) == 3
        assert all(map(alive, pids))
        rank.send_signal(ending)
        _, errors = rank.communicate(timeout=20)  # to the end of the last process that has them
    assert gone(pids)
    assert "leaked semaphore" not in errors


STUCK = """
import ctypes, os, signal, sys, time
from kway.data.loader import Loader
from kway.data.parts import take_apart

def collate(samples):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if samples[0] in (2, 3):
        time.sleep(0.5)  # a thread sends the answer before: it would be stuck as well
    if samples[0] == 2:
        ctypes.PyDLL(None).sleep(600)  # without letting go of the interpreter
    if samples[0] == 3:
        os.kill(os.getpid(), signal.SIGSTOP)
    return os.getpid(), os.getppid()

parts = take_apart(list(range(8)), batch_size=1, seed=0, shuffle=False, workers=2, collate=collate)
loader = Loader(parts, rank=0, size=1, seed=0)
shares = loader.epoch(0)
try:
    print(*{pid for _ in range(2) for pid in next(shares).micro[0][0]}, flush=True)
    time.sleep(60)
finally:
    loader.close()
"""


@pytest.mark.usefixtures("forked_commands")
@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGINT])  # the second closes the loader
def test_workers_that_are_stuck_or_stopped_end_with_their_rank(ending):
    with subprocess.Popen([sys.executable, "-c", STUCK], stdout=subprocess.PIPE, text=True) as rank:
        pids = [int(pid) for pid in rank.stdout.readline().split()]
        assert len(pids) == 3
        time.sleep(1)
        rank.send_signal(ending)
        try:
            assert rank.wait(10) == -ending
        finally:
            rank.kill()
    assert gone(pids)


def test_many_short_epochs_beside_threads():
    torch.ones(2000, 2000).sum()  # starts the threads that make a fork hang
    reader = loader(Drawn(), 2)
    for epoch in range(20):
        assert sum(share.count for share in reader.epoch(epoch)) == 13
    reader.close()


def in_rank(context, workers):
    reader = loader(Drawn(), workers, context.world.rank, context.world.size)
    found = read(reader)
    reader.close()
    return found


def test_ranks_with_workers_draw_streams_that_differ_and_repeat(ranks):
    plain, first, again = (ranks.run(in_rank, workers) for workers in (0, 2, 2))
    assert plain == first == again
    for generator in (1, 2, 3):
        # Micro-batches that count, by (rank, epoch): every sample of every epoch drew something of its own.
        draws = [
            value
            for rank in first
            for _, _, count, micro in rank
            for batch in micro[:count]
            for value in batch[generator]
        ]
        assert len(draws) == 26
        assert len(set(draws)) == 26


def test_an_exception_without_words_comes_back_as_any_other():
    class WordlessError(Exception):
        def __str__(self):
            raise ValueError

        def __reduce__(self):
            raise TypeError

    assert (
        str(Failure(WordlessError(), "loader worker 0").error()) == "WordlessError: <exception str() failed>"
    )
