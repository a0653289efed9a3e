"""Processes that do not want to go: stuck in native code, stopped, deaf to SIGTERM, in a session of their own."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kway.errors import RankError
from kway.launch.local import run

pytestmark = [pytest.mark.starts, pytest.mark.usefixtures("leftovers")]

WITHIN_S = 10.0
# What rank 1 starts; rank 0 is stuck itself. Each writes its process id into the folder.
CHILDREN = """
import ctypes, multiprocessing, os, signal, subprocess, sys, time
from pathlib import Path

def here(folder, name):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    (Path(folder) / f"{name}.new").write_text(str(os.getpid()))
    (Path(folder) / f"{name}.new").rename(Path(folder) / name)

def native(folder, name="native"):
    here(folder, name)
    ctypes.PyDLL(None).sleep(600)  # without letting go of the interpreter

def stopped(folder):
    here(folder, "stopped")
    os.kill(os.getpid(), signal.SIGSTOP)

def session(folder):
    os.setsid()
    here(folder, "session")
    time.sleep(600)

def orphan(folder):
    # The usual way of a daemon: its own session, and an ancestor that is gone.
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            here(folder, "orphan")
            time.sleep(600)
        os._exit(0)
    os.wait()

def cleared(folder):
    code = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(600)"
    path = str(Path(folder) / "cleared")
    subprocess.Popen([sys.executable, "-S", "-c", code, path], env={}, start_new_session=True)

def start_all(folder):
    # The fork server's semaphores have names in shared memory; its workers are no children of the rank.
    context = multiprocessing.get_context("forkserver")
    held = context.Queue()
    (Path(folder) / "semaphore").write_text(held._rlock._semlock.name)
    for target in (native, stopped, session):
        if os.fork() == 0:
            target(folder)
            os._exit(0)
    orphan(folder)
    cleared(folder)
    return held
"""
NAMES = ("native", "stopped", "session", "orphan", "cleared", "rank")
JOB = """
import sys
from pathlib import Path
sys.path.insert(0, FOLDER)
from kway.launch.local import run

def task(context):
    sys.path.insert(0, FOLDER)
    import children, os, time
    if context.world.rank == 0:
        (Path(FOLDER) / "port").write_text(os.environ["MASTER_PORT"])
        children.native(FOLDER, "rank")
    held = children.start_all(FOLDER)
    time.sleep(600)

run(task, ["cpu"] * 2, group=GROUP)
"""


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def pids(folder):
    return {name: int((folder / name).read_text()) for name in NAMES}


def started(folder, names=(*NAMES, "semaphore")):
    """Wait until all that the job starts is there."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if all((folder / name).exists() and (folder / name).read_text() for name in names):
            return True
        time.sleep(0.02)
    return False


def start_job(tmp_path, group=False, **options):
    folder, temporary = tmp_path / "folder", tmp_path / "temporary"
    for each in (folder, temporary):
        each.mkdir()
    (folder / "children.py").write_text(CHILDREN)
    script = tmp_path / "job.py"
    script.write_text(JOB.replace("FOLDER", repr(str(folder))).replace("GROUP", repr(group)))
    parent = subprocess.Popen(
        [sys.executable, str(script)],
        stderr=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(temporary)},
        **options,
    )
    assert started(folder), parent.stderr.read()
    return parent, folder, temporary


def wait_until_gone(found):
    deadline = time.monotonic() + WITHIN_S
    while any(map(alive, found.values())) and time.monotonic() < deadline:
        time.sleep(0.02)
    return [name for name, pid in found.items() if alive(pid)]


@pytest.mark.parametrize(
    ("signals", "status"),
    [
        ([signal.SIGINT], -2),
        ([signal.SIGINT, signal.SIGINT], -2),
        ([signal.SIGINT, signal.SIGTERM], -2),
        ([signal.SIGTERM], 143),
        ([signal.SIGHUP], 129),
        ([signal.SIGQUIT], -3),
        ([signal.SIGKILL], -9),
    ],
    ids=lambda value: "-".join(s.name for s in value) if isinstance(value, list) else None,
)
def test_nobody_survives_the_parent_and_nothing_is_left(signals, status, tmp_path):
    parent, folder, temporary = start_job(tmp_path)
    found = pids(folder)
    assert all(map(alive, found.values()))
    semaphore = Path("/dev/shm", "sem." + (folder / "semaphore").read_text().lstrip("/"))
    assert semaphore.exists()
    for number in signals:
        parent.send_signal(number)
        time.sleep(0.02)
    _, errors = parent.communicate(timeout=WITHIN_S)
    assert wait_until_gone(found) == []
    assert parent.returncode == status, errors
    deadline = time.monotonic() + WITHIN_S
    while (semaphore.exists() or any(temporary.glob("kway-*"))) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not semaphore.exists()
    assert not list(temporary.glob("kway-*"))
    with socket.socket() as port:
        port.bind(("127.0.0.1", int((folder / "port").read_text())))


def test_under_nohup_the_job_outlives_its_terminal(tmp_path):
    parent, folder, _ = start_job(tmp_path, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    found = pids(folder)
    parent.send_signal(signal.SIGHUP)
    time.sleep(0.5)
    assert parent.poll() is None
    assert all(map(alive, found.values()))
    parent.terminate()
    parent.communicate(timeout=WITHIN_S)
    assert wait_until_gone(found) == []


def test_a_failed_rank_takes_all_with_it(tmp_path):
    (tmp_path / "children.py").write_text(CHILDREN)

    def task(context, folder):
        sys.path.insert(0, folder)
        import children

        if context.world.rank == 0:
            children.native(folder, "rank")
        held = children.start_all(folder)
        while not all((Path(folder) / name).exists() for name in NAMES):
            time.sleep(0.02)
        raise ValueError(f"boom {len(str(held))}")

    began = time.monotonic()
    with pytest.raises(RankError, match="rank 1 failed: ValueError: boom"):
        run(task, ["cpu"] * 2, str(tmp_path), group=False, echo=False)
    assert time.monotonic() - began < WITHIN_S
    assert [name for name, pid in pids(tmp_path).items() if alive(pid)] == []
    assert not Path("/dev/shm", "sem." + (tmp_path / "semaphore").read_text().lstrip("/")).exists()
