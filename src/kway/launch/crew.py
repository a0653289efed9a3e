"""Rank processes as one thing: they start together, are heard together, and end together."""

import contextlib
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kway.launch import failure
from kway.launch.failure import Failure
from kway.launch.family import Family, marked, new_mark
from kway.launch.guard import Guard
from kway.launch.interrupt import signals_held
from kway.launch.listen import listen
from kway.launch.output import Echo, Output
from kway.launch.process import RankProcess

_SEND_S = 60.0
# How long to wait for a failure that came before the one that was heard first: longer where all that was heard
# only follows from another rank's end, which a busy machine may take its time to show.
_GRACE_S = 0.1
_GRACE_FOR_CAUSE_S = 3.0
_GRACE_AFTER_LEAVING_S = 1.0
_LOOK_S = 0.05


class Crew:
    """Starts one process of ``entry`` (a module with ``main(control)``) for each of ``environments``.

    ``inherit``: descriptors that single ranks may use, by rank. ``folders``: temporary files that go if this
    process is killed. Standard input of a rank is empty; what it prints goes to ``echo`` and to files in ``logs``.
    """

    def __init__(
        self,
        entry: str,
        environments: Sequence[Mapping[str, str]],
        *,
        echo: Echo | None,
        logs: Path | None,
        folders: Sequence[Path] = (),
        inherit: Mapping[int, int] | None = None,
    ) -> None:
        self._entry, self._environments, self._inherit = entry, list(environments), dict(inherit or {})
        self._output = Output(len(environments), echo, logs)
        self._processes: list[RankProcess] = []
        self._mark = new_mark()
        self._guard: Guard | None = None
        try:
            # First: whatever starts from now on carries the mark that the guard knows.
            self._guard = Guard(self._mark)
            for folder in folders:
                self._guard.remove(folder)
            for rank in range(len(environments)):
                process = self._started(rank)
                self._processes.append(process)
                self._guard.watch(process.pid)
            self._output.start()
        except BaseException:
            self.end()
            raise

    def _started(self, rank: int) -> RankProcess:
        own = marked(self._environments[rank], self._mark_of(rank))
        return RankProcess(rank, self._entry, own, self._output, self._inherit.get(rank, -1))

    def renew(self, rank: int) -> None:
        """End one rank and what it started, and start a new one in its place. Who listens begins anew after that."""
        old = self._processes[rank]
        Family([f"{self._mark_of(rank)};"], [] if old.reaped else [old.pid]).end().finish()
        if self._guard is not None:
            self._guard.forget(old.pid)
        old.reap()
        old.close()
        self._processes[rank] = self._started(rank)
        if self._guard is not None:
            self._guard.watch(self._processes[rank].pid)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self._processes)

    @property
    def pids(self) -> list[int]:
        """The process ids of the ranks."""
        return [process.pid for process in self._processes]

    def send(self, rank: int, message: Any) -> None:
        """Send a message to a rank. That a rank is gone shows in ``listen``, not here."""
        self._processes[rank].send(message, _SEND_S)

    def listen(self) -> Iterator[tuple[int, str, Any]]:
        """Yield what ranks say and that they end: see ``kway.launch.listen``."""
        return listen(self._processes)

    def first_failure(
        self, messages: Iterator[tuple[int, str, Any]], found: Failure, done: Collection[int] = ()
    ) -> Failure:
        """Return the first failure in time, where ``found`` is the first that was heard.

        Where all only follow from the end of another, a rank that left meanwhile is the cause: with exit code 0, or one
        that had said that it is ``done`` with Python's own for output that cannot be flushed.
        What ranks printed until then has been passed on, and the traceback stands in the rank's log.
        """
        failures = {found.rank: found}
        left: list[Failure] = []
        heard, through = time.monotonic(), set(done)
        for rank, kind, value in messages:
            if kind == "done":
                through.add(rank)
            elif kind == "ended" and rank not in failures and failure.is_leaving(value, rank in through):
                left.append(failure.of_leaving(rank, value))
            elif kind in {"failure", "ended"} and rank not in failures:
                failures[rank] = failure.of_message(rank, kind, value)
            grace = _GRACE_S
            if failure.first(failures.values()).is_consequence:
                grace = _GRACE_AFTER_LEAVING_S if left else _GRACE_FOR_CAUSE_S
            if time.monotonic() - heard > grace or len(failures) == self.size:
                break
        self.drain()
        for rank, each in failures.items():
            failures[rank] = failure.explained(each, self._output.last_words(rank))
        if left and failure.first(failures.values()).is_consequence:
            failures[left[0].rank] = left[0]
        for each in failures.values():
            self._output.note(each.rank, each.traceback or f"{each.cause}\n")
        return failure.first(failures.values())

    def note(self, rank: int, text: str) -> None:
        """Add ``text`` to the log of a rank, after what it has printed so far."""
        self.drain()
        self._output.note(rank, text)

    def last_words(self, rank: int) -> str:
        """Return the end of what a rank has written to its standard error so far."""
        return self._output.last_words(rank)

    def drain(self) -> None:
        """Wait until what ranks have printed so far has been passed on."""
        self._output.drain()

    def end(self, leave: float = 0.0, only: int | None = None) -> None:
        """End all ranks and what they started, wherever it went. They get ``leave`` seconds to leave by
        themselves (``only`` one of them, where given); then they are killed. A signal that asks this process to
        stop cuts that short, and acts when all are gone.
        """
        with signals_held(leaving=not leave or only is not None) as held:
            if only is not None:
                self._family(but=only).end()
            deadline = time.monotonic() + leave
            for process in self._processes:
                while time.monotonic() < deadline and not held.hurry and not process.wait(_LOOK_S):
                    pass
            spared = self._family().end()
            for process in self._processes:
                process.reap()
                process.close()
            with contextlib.suppress(Exception):  # an echo that fails was reported when it did
                self._output.close()
            spared.finish()
            if self._guard is not None:
                self._guard.dismiss()

    def _mark_of(self, rank: int) -> str:
        return f"{self._mark}{rank}"

    def _family(self, but: int | None = None) -> Family:
        chosen = [process for process in self._processes if process.rank != but]
        marks = [self._mark] if but is None else [f"{self._mark_of(process.rank)};" for process in chosen]
        return Family(marks, [process.pid for process in chosen if not process.reaped])
