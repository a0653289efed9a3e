"""Ranks of another launcher that are told to end while they are inside a call that hears no signal."""

import contextlib
import ctypes
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from kway.launch import in_time
from kway.launch.in_time import ends_in_time
from kway.launch.interrupt import EndedBySignal, asked_to_stop, signals_raise
from kway.world import StopRequest, World

WITHIN_S = 9.0

SCRIPT = """
import os, signal, sys, time
from functools import partial
from pathlib import Path
import kway, torch
import torch.distributed as dist
from torch import nn

way, out = sys.argv[1:]
x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))

class Net(nn.Linear):
    steps = 0

    def forward(self, x):
        self.steps += self.training
        if self.steps == 4 and os.environ["RANK"] == "1" and way == "train":
            Path(out, "late").touch()
            os.kill(os.getpid(), signal.SIGSTOP)
        return super().forward(x)

job = kway.Job(model=partial(Net, 8, 1), loss=nn.MSELoss(), optimizer=partial(torch.optim.SGD, lr=0.1),
    data=(x, x[:, :1]), batch_size=16, workers=1)
if way == "train":
    kway.train(job, epochs=2, tune=False, out=out + "/run", checkpoint_every="2steps")
with kway.parallel(job) as p:
    if p.is_main:
        work = dist.all_reduce(torch.ones(10), async_op=True)
        Path(out, "late").touch()
    time.sleep(60)
"""


def start(tmp_path, way, ranks=(0, 1)):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    meeting = {"WORLD_SIZE": "2", "OMP_NUM_THREADS": "1", "KWAY_INIT_METHOD": f"file://{tmp_path}/meeting"}
    return [
        subprocess.Popen(
            [sys.executable, str(script), way, str(tmp_path)],
            env={**os.environ, **meeting, "RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in ranks
    ]


def until(path, process):
    deadline = time.monotonic() + 60
    while not path.exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def ended(tmp_path, way, signals):
    """Start two ranks, and send signals to the first once the second is late; return how the first ended."""
    first, second = start(tmp_path, way)
    try:
        until(tmp_path / "late", first)
        time.sleep(0.7)  # until it is inside
        for number in signals:
            first.send_signal(number)
            time.sleep(0.7)
        _, errors = first.communicate(timeout=WITHIN_S)
        return first.returncode, errors
    finally:
        for process in (first, second):
            process.kill()
        second.communicate()


@pytest.mark.starts
@pytest.mark.usefixtures("forked_commands", "leftovers")
@pytest.mark.parametrize(
    ("signals", "code", "words"),
    [
        ([signal.SIGINT], 130, "interrupted"),
        ([signal.SIGTERM, signal.SIGTERM], 143, "ended by SIGTERM"),
    ],
    ids=["once", "twice"],
)
def test_a_rank_inside_a_collective_of_late_ranks_ends_and_says_what_is_there(tmp_path, signals, code, words):
    found, errors = ended(tmp_path, "train", signals)
    assert found == code, errors
    line = errors.splitlines()[-1]
    assert line.startswith(f"kway: {words}: rank 0 of 2 waited for the others in step 4 (all-reduce): ")
    assert f"{tmp_path}/run/checkpoints/step-2 is complete; go on with --resume" in line


@pytest.mark.starts
@pytest.mark.usefixtures("forked_commands", "leftovers")
def test_what_is_under_way_does_not_keep_a_rank_that_ends(tmp_path):
    code, errors = ended(tmp_path, "loop", [signal.SIGINT])
    assert code in (-signal.SIGINT, 130), errors
    assert errors.splitlines()[-1].endswith("KeyboardInterrupt")


@pytest.mark.starts
@pytest.mark.usefixtures("forked_commands", "leftovers")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_rank_that_waits_for_the_others_to_come_ends_and_removes_its_file(tmp_path, number):
    (first,) = start(tmp_path, "train", [0])
    try:
        until(tmp_path / "meeting", first)
        time.sleep(0.3)
        first.send_signal(number)
        _, errors = first.communicate(timeout=WITHIN_S)
    finally:
        first.kill()
    assert first.returncode in ((-signal.SIGINT, 130) if number == signal.SIGINT else (143,)), errors
    assert not (tmp_path / "meeting").exists()


@pytest.fixture
def exits(monkeypatch):
    """The exit codes with which this process would have been ended."""
    codes = []

    def leave(code):
        codes.append(code)
        monkeypatch.setattr(in_time, "GRACE_S", 60)  # once is enough

    monkeypatch.setattr(in_time.os, "_exit", leave)
    monkeypatch.setattr(in_time, "GRACE_S", 0.2)
    monkeypatch.setattr(in_time.atexit, "register", lambda act: None)
    return codes


def deaf(*numbers, seconds=0.3, pause=0.6):
    """Be inside a call of C while signals come, which no signal interrupts; they are heard at its end."""
    library = ctypes.CDLL(None)
    # A mutex of zeros is one that nobody has locked.
    mutex = ctypes.create_string_buffer(64)

    def send():
        time.sleep(0.1)
        for number in numbers:
            os.kill(os.getpid(), number)
            time.sleep(pause)
        time.sleep(seconds - 0.1)
        library.pthread_mutex_unlock(mutex)

    library.pthread_mutex_lock(mutex)
    sender = threading.Thread(target=send)
    sender.start()
    library.pthread_mutex_lock(mutex)
    sender.join()


@contextlib.contextmanager
def slow_to_leave():
    try:
        yield
    finally:
        time.sleep(0.5)


def test_a_signal_that_is_heard_ends_nothing_else(exits):
    with pytest.raises(KeyboardInterrupt), ends_in_time(World(size=2)):
        signal.raise_signal(signal.SIGINT)
    with pytest.raises(EndedBySignal), signals_raise(), ends_in_time(World(size=2)), slow_to_leave():
        signal.raise_signal(signal.SIGTERM)
    assert exits == []
    assert signal.set_wakeup_fd(-1) == -1
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_one_that_is_not_heard_ends_the_process(exits, capfd):
    with pytest.raises(KeyboardInterrupt), ends_in_time(World(rank=1, size=2)):
        deaf(signal.SIGINT)
    assert exits == [130]
    assert "kway: interrupted: rank 1 of 2 was inside a call that did not return\n" in capfd.readouterr().err


@pytest.mark.parametrize(("platform", "held_s"), [("linux", 0.7), ("another", 0.1)])
def test_one_that_was_heard_counts_where_it_is_noticed_late(exits, monkeypatch, platform, held_s):
    def work():
        try:
            os.kill(os.getpid(), signal.SIGINT)
        except KeyboardInterrupt:
            # A call of C that lets no other thread run, and one that does.
            ctypes.PyDLL(None).usleep(int(held_s * 1e6))
            ctypes.CDLL(None).usleep(500_000)
            raise ZeroDivisionError from None

    monkeypatch.setattr(in_time.sys, "platform", platform)
    # Two: a loop of a user's own, and what saves in it.
    with pytest.raises(ZeroDivisionError), ends_in_time(World(size=2)), ends_in_time(World(size=2)):
        work()
    assert exits == []


@pytest.mark.parametrize("hears", [True, False])
def test_the_second_is_another_order_where_the_first_was_heard_late(exits, hears):
    stop, sleep = StopRequest(), ctypes.CDLL(None).usleep

    inside = threading.Event()

    def send():
        inside.wait()
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.7)
        os.kill(os.getpid(), signal.SIGTERM)

    def work():
        inside.set()
        sleep(550_000)
        assert stop.by == "SIGTERM"
        sleep(0 if hears else 700_000)
        for _ in range(50):
            time.sleep(0.01)

    sender = threading.Thread(target=send)
    sender.start()
    # Others of its threads take the signal, so that the call is not broken off.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    try:
        with pytest.raises(EndedBySignal), asked_to_stop(stop), ends_in_time(World(size=2)):
            work()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        sender.join()
    assert exits == ([] if hears else [143])


def test_it_is_heard_beside_a_thousand_open_files(exits):
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as undo:
        if limits[0] < 1_200:
            resource.setrlimit(resource.RLIMIT_NOFILE, (1_200, limits[1]))
            undo.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        for _ in range(1_050):
            undo.enter_context(Path(os.devnull).open())
        with pytest.raises(KeyboardInterrupt), ends_in_time(World(size=2)):
            deaf(signal.SIGINT)
    assert exits == [130]


def test_a_wish_has_time_and_a_second_one_ends_at_once(exits, monkeypatch):
    stop = StopRequest()
    with asked_to_stop(stop), ends_in_time(World(size=2)):
        deaf(signal.SIGTERM)
    assert (stop.by, exits) == ("SIGTERM", [])
    monkeypatch.setattr(in_time, "GRACE_S", 60)
    with asked_to_stop(stop), ends_in_time(World(size=2)):
        deaf(signal.SIGTERM, signal.SIGTERM)
    assert exits == [143]


def test_handlers_of_the_user_s_own_and_processes_that_are_forked_are_left_alone(exits):
    seen = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))
    try:
        with ends_in_time(World(size=2)):
            deaf(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert seen == [signal.SIGUSR1]
    with ends_in_time(World(size=2)):
        pid = os.fork()
        if not pid:
            try:
                signal.raise_signal(signal.SIGINT)
            except BaseException:
                os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(pid, 0)
        deaf()
    assert exits == []
