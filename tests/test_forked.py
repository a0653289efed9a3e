"""Ranks that are forked are what ranks that are started are."""

import os
import random
import sys
from pathlib import Path

import pytest
import torch
from tests.forked import ForkedRanks, adopting

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
    return os.getppid(), hash("a name"), *drawn


def test_they_have_what_started_ones_have(zygotes):
    with Ranks(["cpu"] * 2, threads=1) as started, ForkedRanks(zygotes, 2) as forked:
        assert forked.run(seen) == started.run(seen)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere they are started")
def test_they_are_children_of_this_process_and_differ_in_what_is_drawn(zygotes):
    with ForkedRanks(zygotes, 4) as ranks:
        found = ranks.run(own)
    assert {parent for parent, *_ in found} == {os.getpid()}
    assert found[0][1] != found[1][1], "ranks that have one order of names cannot show that it matters"
    for drawn in zip(*(numbers for _, _, *numbers in found), strict=True):
        assert len(set(drawn)) == 4


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
