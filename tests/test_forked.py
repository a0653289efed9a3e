"""Ranks that are forked are what ranks that are started are."""

import os
import random
import sys
from multiprocessing import forkserver
from pathlib import Path

import pytest
import torch
from tests import forked
from tests.forked import ForkedRanks, Zygotes, adopting, forking
from torch.utils.data import DataLoader, Dataset

from kway.data.loader import Loader
from kway.data.parts import take_apart
from kway.launch.local import Ranks


def seen(context):
    """What a rank has that the way it came to be could change, and the result of some arithmetic."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(65, 65, generator=generator, requires_grad=True)
    torch.linalg.qr(x @ x).R.tanh().sum().backward()
    names = ("KWAY_FAMILY", "HYPOTHESIS_STORAGE_DIRECTORY", "PYTEST_CURRENT_TEST")
    return {
        "leads its session": os.getsid(0) == os.getpgrp() == os.getpid(),
        "environment": sorted(name for name in os.environ if name not in names),
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "gradient": x.grad.numpy().tobytes(),
        "tests": [name for name in sys.modules if name.partition(".")[0] in ("tests", "zygote")],
        "main": vars(sys.modules["__main__"]).get("__file__"),
        "words": sys.argv[0],
        "input": os.read(0, 1),
        "tty": (sys.stdout.isatty(), sys.stdout.line_buffering, sys.stdout.encoding),
        "folder": str(Path.cwd()),
        "path": sys.path,
    }


def own(context):
    drawn = random.random(), torch.randint(10**15, ()).item(), sys.modules["numpy"].random.rand()
    return os.getppid(), b"<zygote>" in Path("/proc/self/cmdline").read_bytes(), hash("a name"), *drawn


def number(context):
    return os.getpid()


# In place of what imports torch: what it does with the first request.
DIES = "print('its last words')"
LATE = "print('its last words', flush=True); time.sleep(60); wire.send(b'1')"
CODE = "import socket, sys, time; wire = socket.socket(fileno=int(sys.argv[1])); wire.send(b'ready'); wire.recv(9); "


def test_they_have_what_started_ones_have(zygotes):
    with Ranks(["cpu"] * 2, threads=1) as started, ForkedRanks(zygotes, 2) as forked:
        assert forked.run(seen) == started.run(seen)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere they are started")
def test_they_are_children_of_this_process_and_differ_in_what_is_drawn(zygotes):
    with ForkedRanks(zygotes, 4) as ranks:
        found = ranks.run(own)
    assert zygotes.of(0) is not None, "nothing to fork from: a warning says why"
    assert all(is_forked for _, is_forked, *_ in found)
    assert {parent for parent, *_ in found} == {os.getpid()}
    assert found[0][2] != found[1][2], "ranks that have one order of names cannot show that it matters"
    for drawn in zip(*(numbers for _, _, _, *numbers in found), strict=True):
        assert len(set(drawn)) == 4


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere they are started")
@pytest.mark.parametrize("then", [DIES, LATE], ids=["dies", "late"])
def test_where_forking_fails_later_ranks_are_started_and_a_warning_says_why(monkeypatch, then):
    monkeypatch.setattr(forked, "_CODE", CODE + then)
    with Zygotes() as own, forking(own), Ranks(["cpu"] * 2, threads=1, group=False) as ranks:
        own.of(0)._sock.settimeout(0.5)
        with pytest.warns(match="ranks are started, .* its last words"):
            found = ranks.run(number)
        assert own.of(0) is own.of(1) is None
        assert found == ranks._crew.pids


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere they are started")
def test_where_one_cannot_be_started_the_other_goes_too(monkeypatch):
    class Only:
        made = 0
        closed = 0

        def __init__(self):
            if Only.made:
                raise BlockingIOError("no process more")
            Only.made += 1

        def close(self):
            Only.closed += 1
            return ""

    monkeypatch.setattr(forked, "Zygote", Only)
    with Zygotes() as own, pytest.warns(match="no process more"):
        assert own.of(0) is None
    assert Only.closed == 1


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere they are started")
def test_this_process_adopts_nobody_afterwards(zygotes):
    with adopting():
        pass
    reading, writing = os.pipe()
    middle = os.fork()
    if middle == 0:
        if os.fork() == 0:
            while os.getppid() == middle:
                pass
            os.write(writing, str(os.getppid()).encode())
        os._exit(0)
    os.waitpid(middle, 0)
    assert int(os.read(reading, 20)) != os.getpid()
    os.close(reading)
    os.close(writing)


class Named(Dataset):
    """Rows that say which process reads them."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.tensor(os.getpid()), torch.tensor(int(os.environ["OF_A_RANK"]))


def read_by_workers(context):
    os.environ["OF_A_RANK"] = str(context.world.rank)
    parts = take_apart(
        DataLoader(Named(), batch_size=2, num_workers=1), batch_size=None, seed=0, shuffle=False
    )
    reader = Loader(parts, rank=0, size=1, seed=0, micro_batch=1)
    pids, ranks = zip(*(batch for share in reader.epoch(0) for batch, _ in share.micro), strict=True)
    (worker,), (rank,) = (set(torch.cat(each).tolist()) for each in (pids, ranks))
    shown = Path(f"/proc/{worker}/cmdline").read_bytes()
    folder, parent = Path(f"/proc/{worker}/cwd").readlink(), forkserver._forkserver._forkserver_pid
    reader.close()
    ended = os.waitpid(parent, os.WNOHANG)
    return rank, b"<zygote>" in shown, str(folder), ended


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere they are started")
def test_loader_workers_of_a_rank_are_forked_and_in_its_place(zygotes, leftovers):
    with ForkedRanks(zygotes, 2) as ranks:
        found = ranks.run(read_by_workers)
    assert found == [(rank, True, str(Path.cwd()), (0, 0)) for rank in (0, 1)]
