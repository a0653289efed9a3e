"""Where a call may come from: no guard, no file, no main thread."""

import subprocess
import sys
import threading

import pytest

from kway.launch.local import run

pytestmark = [pytest.mark.starts, pytest.mark.usefixtures("leftovers")]

CODE = """
from dataclasses import dataclass
from kway.launch.local import run

offset = 5

@dataclass
class Point:
    x: int

def task(context, point, scale):
    return Point(scale(point.x) + offset + context.world.rank)

got = run(task, ["cpu"] * 2, Point(1), lambda x: 10 * x, group=False)
assert got == [Point(15), Point(16)], got
print("once")
"""


def test_a_script_without_a_guard(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(CODE)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "once\n"), done.stderr


def test_code_on_the_command_line():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "once\n"), done.stderr


def test_code_on_standard_input(tmp_path):
    done = subprocess.run(
        [sys.executable, "-"], input=CODE, capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert (done.returncode, done.stdout) == (0, "once\n"), done.stderr


def test_code_without_a_file_as_in_a_notebook():
    namespace = {"__name__": "__main__"}
    exec(compile(CODE.replace('print("once")', ""), "<cell 1>", "exec"), namespace)
    assert [point.x for point in namespace["got"]] == [15, 16]


def test_a_thread_that_ends_before_its_ranks_do():
    got = []
    thread = threading.Thread(
        target=lambda: got.extend(run(lambda c: c.world.rank, ["cpu"] * 2, group=False))
    )
    thread.start()
    thread.join()
    assert got == [0, 1]
