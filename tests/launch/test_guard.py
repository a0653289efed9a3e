"""Which process groups the guard ends when nobody has dismissed it."""

import os
import subprocess
import sys

import pytest

from kway.launch.family import new_mark
from kway.launch.guard import left
from kway.launch.process import SOURCES

pytestmark = [pytest.mark.starts, pytest.mark.usefixtures("leftovers")]
CODE = "import sys; sys.path.insert(0, sys.argv[3]); from kway.launch.guard import main; main()"


def sleeper():
    return subprocess.Popen(
        [sys.executable, "-S", "-c", "import time; time.sleep(30)"], start_new_session=True
    )


def test_a_group_that_is_gone_is_left_alone():
    with sleeper() as watched, sleeper() as stranger:
        told = f"group {watched.pid}\0group {stranger.pid}\0gone {stranger.pid}\0"
        words = [sys.executable, "-I", "-S", "-c", CODE, str(os.getpid()), new_mark(), SOURCES]
        subprocess.run(words, input=told.encode(), check=True, timeout=20)
        try:
            assert watched.wait(10) == -9
            assert stranger.poll() is None
        finally:
            stranger.kill()


def test_a_number_that_comes_again_is_a_group_again():
    told = [b"group 7", b"group 8", b"folder /a b", b"gone 7", b"group 7", b"gone 8"]
    assert left(told) == ([7], [b"/a b"])
