"""The parent of ranks is interrupted, told to stop, or killed: its ranks and their loader workers go, too."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from kway.launch.guard import Guard
from kway.launch.interrupt import signals_raise

pytestmark = pytest.mark.starts

JOB = """
import os, signal, sys, time
import torch
from torch.utils.data import DataLoader
from kway.launch.local import run

class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 1000
    def __getitem__(self, index):
        if index > 8:
            time.sleep(600)
        return torch.ones(1)

def task(context, large):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    loader = DataLoader(Slow(), num_workers=2, multiprocessing_context="fork")
    for batch in loader:
        context.emit(context.world.rank)

run(task, ["cpu"] * 2, torch.zeros(100_000), threads=1, group=False, on_event=lambda e: print(e, flush=True))
"""
WITHIN_S = 10.0


@pytest.fixture
def short():
    """A folder for temporary files: sockets of loader workers lie there, whose paths must be short."""
    folder = Path(tempfile.mkdtemp(prefix="t"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def start_job(tmp_path, temporary):
    """Start a script whose ranks have loader workers that are stuck in the data set; wait until they are."""
    script = tmp_path / "job.py"
    script.write_text(JOB)
    parent = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(temporary)},
    )
    busy = set()
    while len(busy) < 2:
        line = parent.stdout.readline()
        assert line, parent.stderr.read()
        busy.add(line)
    return parent


@pytest.mark.parametrize(
    ("number", "status", "way"),
    [
        (signal.SIGKILL, -9, None),
        (signal.SIGTERM, 143, "forked_commands"),
        (signal.SIGINT, -2, "forked_commands"),
    ],
)
def test_nothing_survives_the_parent(number, status, way, tmp_path, short, leftovers, request):
    if way:  # how it was started is the point of no test here: the one that is killed is
        request.getfixturevalue(way)
    parent = start_job(tmp_path, short)
    # The parent, two ranks with two loader workers each, and the guard.
    assert len(leftovers()) >= 8
    parent.send_signal(number)
    began = time.monotonic()
    _, errors = parent.communicate(timeout=WITHIN_S)
    while leftovers() and time.monotonic() - began < WITHIN_S:
        time.sleep(0.02)
    assert leftovers() == {}
    assert parent.returncode == status, errors
    assert not [path for path in short.iterdir() if path.name.startswith("kway-")]


@pytest.mark.usefixtures("forked_commands")
def test_ranks_go_even_if_the_guard_was_killed_first(tmp_path, short, leftovers):
    parent = start_job(tmp_path, short)
    (guard,) = [pid for pid, line in leftovers().items() if "kway.launch.guard" in line]
    os.kill(guard, signal.SIGKILL)
    parent.kill()
    parent.communicate(timeout=WITHIN_S)
    deadline = time.monotonic() + WITHIN_S
    while leftovers() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert leftovers() == {}


def test_the_guard_kills_what_it_knows_when_its_parent_vanishes(leftovers, tmp_path):
    folder = tmp_path / "files"
    folder.mkdir()
    code = f"""
import os, subprocess, sys
from pathlib import Path
from kway.launch.guard import Guard
guard = Guard("no such mark")
guard.remove(Path({str(folder)!r}))
guard.watch(subprocess.Popen(["sleep", "600"], start_new_session=True).pid)
if os.fork():
    os.kill(os.getpid(), 9)
os.setsid()
import time
time.sleep(600)  # a child of the parent keeps the pipe to the guard open
"""
    subprocess.run([sys.executable, "-c", code], check=False, timeout=WITHIN_S)
    deadline = time.monotonic() + WITHIN_S
    while any("sleep 600" in line for line in leftovers().values()) and time.monotonic() < deadline:
        time.sleep(0.02)
    left = leftovers()
    assert not any(line.startswith("sleep") for line in left.values())
    while folder.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not folder.exists()
    for pid in left:
        os.kill(pid, signal.SIGKILL)


def test_a_dismissed_guard_touches_nothing(leftovers, tmp_path):
    guard = Guard("no such mark")
    guard.remove(tmp_path)
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as other:
        guard.watch(other.pid)
        guard.dismiss()
        assert other.poll() is None
        other.kill()
    assert tmp_path.exists()


def test_a_users_own_handler_of_sigterm_stays():
    def own(number, frame):
        pass

    before = signal.signal(signal.SIGTERM, own)
    try:
        with signals_raise():
            assert signal.getsignal(signal.SIGTERM) is own
    finally:
        signal.signal(signal.SIGTERM, before)


def test_signals_raise_in_the_main_thread_only_and_is_restored():
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    with pytest.raises(SystemExit) as leaving, signals_raise():
        signal.raise_signal(signal.SIGTERM)
    assert leaving.value.code == 143
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL

    def elsewhere():
        with signals_raise():
            seen.append(signal.getsignal(signal.SIGTERM))

    seen = []
    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert seen == [signal.SIG_DFL]
