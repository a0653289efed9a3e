"""The ranks of this machine: started together, kept for one task or several, gone together."""

import shutil
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from kway.backends import backend_of
from kway.errors import KwayError, UsageError
from kway.launch import address, failure
from kway.launch.blame import dump_call
from kway.launch.closing import Closing
from kway.launch.crew import Crew
from kway.launch.descriptors import enough, open_missing
from kway.launch.interrupt import signals_raise
from kway.launch.output import Echo, to_parent
from kway.launch.payload import load
from kway.launch.stall import StallWatch
from kway.launch.status import BOARD, Board
from kway.launch.temporary import made_folder, needs_room
from kway.launch.worker import Setup, Task
from kway.world import StopRequest

_LEAVE_S = 5.0


class Ranks(Closing):
    """Ranks of this machine, one for each of ``devices`` (``cpu``, or ``cuda:I`` as this process counts).

    They start with the first task, after its function and arguments are known to travel. ``logs``: an existing
    folder for ``rank-N.log``. ``threads``: intra-op CPU threads a rank. ``echo``: whether what ranks print goes
    to this process's own streams, or a function of (rank, stream, text). ``group``: whether tasks run in a
    process group of torch; without, a rank does not import torch. ``preload``: modules that ranks import while
    they wait for the first task.

    Raises ``UsageError`` for a list of devices that cannot form ranks, and a network interface that is not there.
    """

    def __init__(
        self,
        devices: Sequence[str],
        *,
        logs: Path | None = None,
        threads: int | None = None,
        echo: bool | Echo = True,
        start_timeout: timedelta = timedelta(seconds=120),
        group: bool = True,
        preload: Sequence[str] = (),
    ) -> None:
        self._devices = tuple(devices)
        self._environment = address.environment(self._devices, threads)
        address.check_interface(self._environment, backend_of(self._devices))
        self._threads, self._group, self._preload = threads, group, tuple(preload)
        self._logs, self._start_timeout = logs, start_timeout.total_seconds()
        self._echo = to_parent(len(self._devices)) if echo is True else echo or None
        self._folder: Path | None = None
        self._crew: Crew | None = None
        self._board: Board | None = None
        self._ready: set[int] = set()
        self._tasks = 0
        self._closed = False

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self._devices)

    @property
    def alive(self) -> bool:
        """Whether further tasks can run: false after a failed one, and once closed."""
        return not self._closed

    def run(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        size: int | None = None,
        on_event: Callable[[Any], None] | None = None,
        limit: timedelta | None = None,
        stop: StopRequest | None = None,
        stall_timeout: timedelta | None = None,
    ) -> list[Any]:
        """Call ``function(context, *arguments)`` in the first ``size`` ranks (all, where ``None``).

        Returns the results by rank. ``on_event`` is called here, in this thread, with what ranks emit. Raises
        ``UsageError`` for what cannot travel (nothing has been started or disturbed by then), kway's own
        errors as the rank raised them, and ``RankError`` for any other end of a rank: the first in time. With
        ``stall_timeout`` a rank that the others wait for and that says nothing for so long ends the task with
        ``StallError``; torch's own time limits do not apply then. After an error in a task all ranks are gone.
        ``stop``: once it is set here, every rank's ``Context.stop`` is.
        """
        size = self.size if size is None else size
        if not 1 <= size <= self.size:
            raise UsageError(f"a task for {size} ranks", f"there are {self.size}")
        if self._closed:
            raise KwayError("these ranks are gone", "a task failed or they were closed", "start new ones")
        call = dump_call(function, arguments, self._own_folder())
        try:
            with signals_raise():
                with enough(self.size):
                    crew = self._crew or self._start()
                self._tasks += 1
                watch = self._watch(crew, size, stall_timeout)
                for rank in range(size):
                    crew.send(rank, Task(self._tasks, size, call, stall_timeout is not None))
                return self._collect(crew, size, on_event, limit, stop or StopRequest(), watch)
        except BaseException:
            self.close(kill=True)
            raise
        finally:
            for file in self._own_folder().glob("payload-*") if not self._closed else ():
                file.unlink(missing_ok=True)

    def close(self, *, kill: bool = False) -> None:
        """End all ranks and remove the temporary files. ``kill``: at once; else they leave by themselves."""
        if self._closed:
            return
        self._closed = True
        try:
            if self._board is not None:
                self._board.close()
            if self._crew is not None:
                for rank in range(0 if kill else self.size):
                    self._crew.send(rank, None)
                self._crew.end(leave=0.0 if kill else _LEAVE_S)
        finally:
            if self._folder is not None:
                shutil.rmtree(self._folder, ignore_errors=True)

    def _own_folder(self) -> Path:
        if self._folder is None:
            self._folder = made_folder()
        return self._folder

    def _watch(self, crew: Crew, size: int, timeout: timedelta | None) -> StallWatch:
        assert self._board is not None
        self._board.clear()
        return StallWatch(self._board, crew.pids[:size], self._own_folder(), timeout)

    def _start(self) -> Crew:
        open_missing()
        with needs_room(self._own_folder()):
            self._board = Board(self._own_folder() / BOARD, self.size)
        with address.listening_socket() as listener:
            port = listener.getsockname()[1]
            crew = Crew(
                "kway.launch.worker",
                [
                    self._environment | address.rank_variables(rank, self.size, port)
                    for rank in range(self.size)
                ],
                echo=self._echo,
                logs=self._logs,
                folders=[self._own_folder()],
                inherit={0: listener.fileno()},
            )
            self._crew = crew
            for rank in range(self.size):
                crew.send(rank, self._setup(rank, port, listener.fileno()))
        return crew

    def _setup(self, rank: int, port: int, listen_fd: int) -> Setup:
        return Setup(
            rank=rank,
            size=self.size,
            device=address.device_of_rank(self._devices[rank], rank),
            backend=backend_of(self._devices),
            port=port,
            listen_fd=listen_fd if rank == 0 else -1,
            group=self._group,
            threads=self._threads,
            preload=self._preload,
            path=address.python_path(),
            folder=str(self._own_folder()),
        )

    def _collect(
        self,
        crew: Crew,
        size: int,
        on_event: Callable[[Any], None] | None,
        limit: timedelta | None,
        stop: StopRequest,
        watch: StallWatch,
    ) -> list[Any]:
        """Wait for all results; raise the first failure in time."""
        results: dict[int, Any] = {}
        started = time.monotonic()
        messages, told = crew.listen(), False
        for rank, kind, value in messages:
            if stop.by and not told:
                told = True
                for each in range(size):
                    crew.send(each, StopRequest(stop.by, self._tasks))
            if kind == "event" and on_event is not None:
                on_event(load(value))
            elif kind == "ready":
                self._ready.add(rank)
            elif kind == "result":
                results[rank] = load(value, keep=False)
                if len(results) == size:
                    break
            elif kind in {"failure", "ended"}:
                found = crew.first_failure(messages, failure.of_message(rank, kind, value))
                raise failure.to_error(found)
            else:
                self._check_time(time.monotonic() - started, size, results, limit)
                watch.look(crew.note)
        crew.drain()
        return [results[rank] for rank in range(size)]

    def _check_time(self, passed: float, size: int, results: dict[int, Any], limit: timedelta | None) -> None:
        missing = [rank for rank in range(size) if rank not in self._ready]
        if missing and passed > self._start_timeout:
            raise KwayError(f"no sign of life from {_names(missing)} after {self._start_timeout:g} s")
        if limit is not None and passed > limit.total_seconds():
            late = [rank for rank in range(size) if rank not in results]
            raise KwayError(f"no end of {_names(late)} after {limit.total_seconds():g} s")


def run(
    function: Callable[..., Any],
    devices: Sequence[str],
    *arguments: Any,
    logs: Path | None = None,
    threads: int | None = None,
    echo: bool | Echo = True,
    on_event: Callable[[Any], None] | None = None,
    group: bool = True,
    preload: Sequence[str] = (),
    stop: StopRequest | None = None,
    stall_timeout: timedelta | None = None,
) -> list[Any]:
    """Start ranks on ``devices`` for one task and return its results by rank. See ``Ranks``."""
    with Ranks(devices, logs=logs, threads=threads, echo=echo, group=group, preload=preload) as ranks:
        return ranks.run(function, *arguments, on_event=on_event, stop=stop, stall_timeout=stall_timeout)


def _names(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
