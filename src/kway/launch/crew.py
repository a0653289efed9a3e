"""Rank processes as one thing: they start together, are heard together, and end together."""

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kway.launch import failure
from kway.launch.failure import Failure
from kway.launch.guard import Guard
from kway.launch.listen import listen
from kway.launch.output import Echo, Output
from kway.launch.process import RankProcess

_SEND_S = 60.0
# How long to wait for a failure that came before the one that was heard first: longer where all that was heard
# only follows from another rank's end.
_GRACE_S = 0.1
_GRACE_FOR_CAUSE_S = 1.0


class Crew:
    """Starts one process of ``entry`` (a module with ``main(control)``) for each of ``environments``.

    ``inherit``: descriptors that single ranks may use, by rank. ``folder``: temporary files that go with the
    ranks. Standard input of a rank is empty; what it prints goes to ``echo`` and to files in ``logs``.
    """

    def __init__(
        self,
        entry: str,
        environments: Sequence[Mapping[str, str]],
        *,
        echo: Echo | None,
        logs: Path | None,
        folder: Path | None = None,
        inherit: Mapping[int, int] | None = None,
    ) -> None:
        self._output = Output(len(environments), echo, logs)
        self._processes: list[RankProcess] = []
        self._guard: Guard | None = None
        try:
            for rank, environment in enumerate(environments):
                fd = (inherit or {}).get(rank, -1)
                self._processes.append(RankProcess(rank, entry, environment, self._output, fd))
            self._guard = Guard(folder)
            for process in self._processes:
                self._guard.watch(process.pid)
            self._output.start()
        except BaseException:
            self.end()
            raise

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self._processes)

    def send(self, rank: int, message: Any) -> None:
        """Send a message to a rank. That a rank is gone shows in ``listen``, not here."""
        self._processes[rank].send(message, _SEND_S)

    def listen(self) -> Iterator[tuple[int, str, Any]]:
        """Yield what ranks say and that they end: see ``kway.launch.listen``."""
        return listen(self._processes)

    def first_failure(self, messages: Iterator[tuple[int, str, Any]], found: Failure) -> Failure:
        """Return the first failure in time, where ``found`` is the first that was heard.

        What ranks printed until then has been passed on, and the traceback stands in the rank's log.
        """
        failures = {found.rank: found}
        heard = time.monotonic()
        for rank, kind, value in messages:
            if kind in {"failure", "ended"} and rank not in failures and value != 0:
                failures[rank] = failure.of_message(rank, kind, value)
            only_follows = failure.first(failures.values()).is_consequence
            grace = _GRACE_FOR_CAUSE_S if only_follows else _GRACE_S
            if time.monotonic() - heard > grace or len(failures) == self.size:
                break
        self.drain()
        for each in failures.values():
            self._output.note(each.rank, each.traceback or f"{each.cause}\n")
        return failure.first(failures.values())

    def drain(self) -> None:
        """Wait until what ranks have printed so far has been passed on."""
        self._output.drain()

    def end(self, leave: float = 0.0, only: int | None = None) -> None:
        """End all ranks and what they started. They get ``leave`` seconds to leave by themselves (``only``
        one of them, where given); then they are killed.
        """
        try:
            self._kill(but=only)
            deadline = time.monotonic() + leave
            for process in self._processes if leave else ():
                process.wait(max(0.0, deadline - time.monotonic()))
        finally:
            for process in self._processes:
                process.kill()
            for process in self._processes:
                process.reap()
                process.close()
            with contextlib.suppress(Exception):  # an echo that fails was reported when it did
                self._output.close()
            if self._guard is not None:
                self._guard.dismiss()

    def _kill(self, but: int | None) -> None:
        for process in self._processes if but is not None else ():
            if process.rank != but:
                process.kill()
