"""The inside of a rank: waits for tasks, runs them in a process group of their own, reports.

Started by ``kway.launch.local`` in a fresh interpreter.
"""

import atexit
import contextlib
import os
import queue
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

from kway.launch import stacks
from kway.launch.address import LOOPBACK
from kway.launch.blame import dump_value
from kway.launch.built import usable_backend
from kway.launch.failure import of_exception
from kway.launch.lifeline import Lifeline, flush_output, write_whole_lines
from kway.launch.payload import load
from kway.launch.semaphores import cleared_quietly
from kway.launch.status import BOARD, Status, announce, here
from kway.launch.temporary import kept_in
from kway.world import StopRequest, World

_FOR_EVER = timedelta(days=365)
_STORE_TIMEOUT = timedelta(minutes=5)  # torch's own


@dataclass(frozen=True)
class Setup:
    """What the parent tells a rank at its start.

    ``device`` is this rank's torch device string, ``port`` that of the store on 127.0.0.1, ``listen_fd`` the
    listening socket on rank 0 (-1 elsewhere), ``group`` whether tasks run in a process group, ``threads``
    the intra-op threads (``None``: torch's choice), ``preload`` modules to import before the first task, ``cores`` the
    logical processors that it is to stay on (empty: all).
    """

    rank: int
    size: int
    device: str
    backend: str
    port: int
    listen_fd: int
    group: bool
    threads: int | None
    preload: tuple[str, ...]
    path: tuple[str, ...]
    folder: str
    cores: tuple[int, ...] = ()


@dataclass(frozen=True)
class Task:
    """One call for the first ``size`` ranks. ``number`` counts the tasks of these ranks; ``call`` is a payload.

    ``watched``: the parent ends the task where a rank makes no progress, so that no time limit of torch need.
    """

    number: int
    size: int
    call: bytes
    watched: bool = False


@dataclass(frozen=True)
class Context:
    """What a task gets as its first argument: where it stands, a way to tell the parent something, and whether the
    parent was asked to stop.

    ``status``: says what this rank is at.
    """

    world: World
    emit: Callable[[Any], None] = field(compare=False)
    stop: StopRequest = field(default_factory=StopRequest, compare=False)
    status: Status = field(default_factory=Status, compare=False)


class _Group:
    """Process groups over one store that lives as long as the rank does; a fresh group for each task."""

    def __init__(self, setup: Setup) -> None:
        import torch

        stores: Any = import_module("torch.distributed")
        self._setup = setup
        if setup.threads is not None:
            torch.set_num_threads(setup.threads)
        if setup.device != "cpu":
            torch.cuda.set_device(torch.device(setup.device))
        self._store = stores.TCPStore(
            LOOPBACK,
            setup.port,
            is_master=setup.rank == 0,
            wait_for_workers=False,
            master_listen_fd=setup.listen_fd if setup.rank == 0 else None,
        )

    @contextlib.contextmanager
    def task(self, number: int, size: int, status: Status, watched: bool) -> Iterator[None]:
        import torch
        import torch.distributed as dist
        from torch.distributed.distributed_c10d import PrefixStore

        setup = self._setup
        store = PrefixStore(f"task{number}", self._store)
        store.set_timeout(_FOR_EVER if watched else _STORE_TIMEOUT)
        dist.init_process_group(
            usable_backend(setup.device),
            store=store,
            rank=setup.rank,
            world_size=size,
            timeout=_FOR_EVER if watched else None,
            device_id=torch.device(setup.device) if setup.backend == "nccl" else None,
        )
        yield
        status.end()
        # A rank that is done must not take its connections away while others still make theirs, or work. A
        # collective would have a time limit; the last rank may have hours of work left.
        if store.add("done", 1) == size:
            store.set("all done", "")
        store.wait(["all done"], _FOR_EVER)
        if dist.is_initialized():
            dist.destroy_process_group()


def _world(setup: Setup, size: int) -> World:
    threads = setup.threads
    if threads is None:
        threads = import_module("torch").get_num_threads() if setup.group else 1
    return World(
        rank=setup.rank,
        size=size,
        local_rank=setup.rank,
        local_size=size,
        device=setup.device,
        backend=setup.backend,
        threads=threads,
        origin="local",
    )


def _run(setup: Setup, task: Task, group: _Group | None, line: Lifeline, stop: StopRequest) -> bytes:
    os.environ.update(WORLD_SIZE=str(task.size), LOCAL_WORLD_SIZE=str(task.size))
    function, arguments = load(task.call)
    status = here()
    status.at("start")
    context = Context(
        _world(setup, task.size),
        lambda value: line.send("event", dump_value("an event", value)),
        stop,
        status,
    )
    with group.task(task.number, task.size, status, task.watched) if group else contextlib.nullcontext():
        result = function(context, *arguments)
        payload = dump_value("the result of a rank", result, Path(setup.folder))
    status.end()
    return payload


def main(control: int) -> None:
    """Serve the parent at the other end of the descriptor ``control`` until it says to leave."""
    done: list[bool] = []
    # Registered first, so called last: after all other exit handlers.
    atexit.register(_skip_teardown, done)
    line = Lifeline(control)
    setup: Setup = line.first()
    if setup.cores:
        # Before any library counts them.
        os.sched_setaffinity(0, setup.cores)
    tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
    stops: dict[int, StopRequest] = {}

    def take(message: Any) -> None:
        if isinstance(message, StopRequest):
            stop = stops.setdefault(message.task, StopRequest())
            stop.by, stop.direct = message.by, False
        else:
            tasks.put(message)

    line.watch(take)
    write_whole_lines()
    # As where a file is loaded: torch is there before the file's folder comes first, which may have a glob.py.
    sys.path += [entry for entry in setup.path if entry not in sys.path]
    folder = Path(setup.folder)
    announce(folder / BOARD, setup.rank, watched=False)
    stacks.answer_in(folder, setup.rank)
    kept_in(folder)
    cleared_quietly()
    try:
        group = _Group(setup) if setup.group else None
        for name in setup.preload:
            import_module(name)
        sys.path[:] = setup.path
        line.send("ready")
        while (task := tasks.get()) is not None:
            result = _run(setup, task, group, line, stops.setdefault(task.number, StopRequest()))
            flush_output()
            line.send("result", result)
        done.append(True)
    except BaseException as error:  # whatever it is, the parent must hear of it
        flush_output()
        line.send("failure", of_exception(setup.rank, error))
        # The parent ends this process. To leave now would give the other ranks something to complain about.
        while tasks.get() is not None:
            pass


def _skip_teardown(done: list[bool]) -> None:
    """Leave now. To take torch's modules apart first would cost the user up to a second and change nothing."""
    if done:
        flush_output()
        os._exit(0)
