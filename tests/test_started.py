"""That no start of a process goes by unseen."""

import ctypes
import os
import subprocess
import sys

import pytest
from tests.started import started

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")


def forks():
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)


def spawns():
    os.waitpid(os.posix_spawn("/bin/true", ["true"], {}), 0)


def from_c():
    """As a library does it, which no function of Python hears of."""
    ctypes.CDLL(None).system(b"sleep 0.1")


@pytest.mark.parametrize(
    "start", [forks, spawns, from_c, lambda: subprocess.run(["true"], check=True), lambda: os.system("true")]
)
def test_a_process_is_seen_however_short_it_lives(start):
    with started() as found:
        start()
    assert found


def test_what_starts_none_and_what_ran_before_is_no_start():
    before = subprocess.Popen(["sleep", "60"])
    try:
        with started() as found:
            sum(range(1_000_000))
        assert found == []
    finally:
        before.kill()
        before.wait()
