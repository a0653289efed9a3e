"""Processes of this machine that take one call after another, each on a device of its own, and know nothing of each
other: for work that is independent.
"""

import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

from kway.backends import backend_of
from kway.errors import KwayError
from kway.launch import address, failure
from kway.launch.closing import Closing
from kway.launch.crew import Crew
from kway.launch.descriptors import enough, open_missing
from kway.launch.failure import Failure
from kway.launch.output import Echo, to_parent
from kway.launch.payload import load
from kway.launch.status import BOARD, Board
from kway.launch.temporary import made_folder, needs_room
from kway.launch.worker import Setup, Task

_LEAVE_S = 5.0
# A library that looks for its place finds itself alone.
_ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}


class Ended(NamedTuple):
    """The end of the call of one ``item`` at the ``place`` of a process: its ``result``, or how it ``failed``."""

    item: int
    place: int
    result: Any
    failed: Failure | None


class Pool(Closing):
    """One process for each of ``devices`` (``cpu``, or ``cuda:I`` as this process counts), which sees no other GPU.

    ``threads``: intra-op CPU threads of each; ``cores``: the logical processors of each, where it is to stay on some.
    ``preload``: modules that they import while they wait for the first call. Raises ``UsageError`` for a list of
    devices that cannot be used.
    """

    def __init__(
        self,
        devices: Sequence[str],
        *,
        threads: int,
        cores: Sequence[Sequence[int]] = (),
        preload: Sequence[str] = (),
        start_timeout: timedelta = timedelta(seconds=120),
    ) -> None:
        address.environment(devices, threads)
        self._devices, self._threads, self._preload = tuple(devices), threads, tuple(preload)
        self._cores = [tuple(part) for part in cores] or [()] * len(devices)
        self._start_timeout = start_timeout.total_seconds()
        self._folder = made_folder()
        self._crew: Crew | None = None
        self._board: Board | None = None
        # By place: which call it is at; since when a process there has not said that it is ready.
        self._at: dict[int, int] = {}
        self._begun: dict[int, float] = {}
        self._tasks = 0

    @property
    def folder(self) -> Path:
        """Where the large parts of what travels lie."""
        return self._folder

    def run(self, count: int, task_of: Callable[[int], bytes]) -> Iterator[Ended]:
        """Run the tasks 0 to ``count`` - 1, each in the first process that is free, and yield their ends as they come.

        ``task_of(index)``: the payload of function and arguments, made when it is sent; see ``kway.launch.local.Ranks``
        for what it is called with. One that returns a ``Failure`` has failed. A process that died, and one on a GPU
        after a failure there (an error of CUDA stays with its process), is replaced where calls are left.
        Raises ``KwayError`` where a process does not start.
        """
        waiting = deque(range(count))

        def give(place: int) -> None:
            if waiting:
                index = self._at[place] = waiting.popleft()
                self._tasks += 1
                crew.send(place, Task(self._tasks, 1, task_of(index)))

        with enough(len(self._devices)):
            crew = self._crew = self._start()
        for place in range(len(self._devices)):
            give(place)
        messages, left = crew.listen(), count
        while left:
            place, kind, value = next(messages)
            if kind == "ready":
                self._begun.pop(place, None)
            elif kind == "result":
                ended = self._ended(crew, place, load(value, keep=False))
                left -= 1
                if ended.failed is not None and self._devices[place] != "cpu" and waiting:
                    self._renew(crew, place)
                    messages = crew.listen()
                give(place)
                yield ended
            elif kind in {"failure", "ended"}:
                found = failure.of_message(place, kind, value)
                if place in self._begun:
                    raise failure.to_error(found)
                died = self._ended(crew, place, found) if place in self._at else None
                if waiting and (died is not None or kind == "ended"):
                    self._renew(crew, place)
                    messages = crew.listen()
                    give(place)
                if died is not None:
                    left -= 1
                    yield died
            else:
                self._check_time()

    def close(self, *, kill: bool = False) -> None:
        """End all processes and remove the temporary files. ``kill``: at once; else they leave by themselves."""
        try:
            if self._board is not None:
                self._board.close()
            if self._crew is not None:
                for place in range(0 if kill else len(self._devices)):
                    self._crew.send(place, None)
                self._crew.end(leave=0.0 if kill else _LEAVE_S)
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _ended(self, crew: Crew, place: int, outcome: Any) -> Ended:
        # While it still counts as at work, what it has printed is marked as its own.
        crew.drain()
        index = self._at.pop(place)
        if isinstance(outcome, Failure):
            return Ended(index, place, None, failure.explained(outcome, crew.last_words(place)))
        return Ended(index, place, outcome, None)

    def _start(self) -> Crew:
        open_missing()
        with needs_room(self._folder):
            self._board = Board(self._folder / BOARD, len(self._devices))
        crew = Crew(
            "kway.launch.worker",
            [address.environment([device], self._threads) | _ALONE for device in self._devices],
            echo=self._echo(),
            logs=None,
            folders=[self._folder],
        )
        self._crew = crew
        for place in range(len(self._devices)):
            self._set_up(crew, place)
        return crew

    def _echo(self) -> Echo:
        count = len(self._devices)
        plain = to_parent(1)

        def echo(place: int, stream: str, text: str) -> None:
            at = self._at.get(place)
            plain(place, stream, text if count == 1 or at is None else f"[item {at}] {text}")

        return echo

    def _set_up(self, crew: Crew, place: int) -> None:
        self._begun[place] = time.monotonic()
        setup = Setup(
            rank=place,
            size=len(self._devices),
            # Of the GPUs that it sees, the only one.
            device=address.device_of_rank(self._devices[place], 0),
            backend=backend_of(self._devices),
            port=0,
            listen_fd=-1,
            group=False,
            threads=self._threads,
            preload=self._preload,
            path=address.python_path(),
            folder=str(self._folder),
            cores=self._cores[place],
        )
        crew.send(place, setup)

    def _renew(self, crew: Crew, place: int) -> None:
        crew.renew(place)
        self._set_up(crew, place)

    def _check_time(self) -> None:
        now = time.monotonic()
        for place, since in self._begun.items():
            if now - since > self._start_timeout:
                raise KwayError(
                    f"no sign of life from the process on {self._devices[place]} after {self._start_timeout:g} s"
                )
