"""One tracker in a thread of its own: it is told in order what happens, and holds nobody up."""

import threading
from queue import SimpleQueue
from typing import Any

from kway.errors import line_of
from kway.trackers.protocol import Tracker


class Told:
    """Calls a tracker's methods one after the other in one thread, until one of them fails.

    One thread: what a library keeps by thread (MLflow's active run) is found again. Apart: a server that takes its
    time does not make a step longer. After a failure, one of ``begin`` as well, only ``end`` is called, so that files
    and connections close.
    """

    def __init__(self, tracker: Tracker) -> None:
        self.name = type(tracker).__name__.lower()
        self._tracker = tracker
        self._calls: SimpleQueue[tuple[str, tuple[Any, ...]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._begun = False
        self._failure = ""
        self._said = False

    def call(self, method: str, *arguments: Any) -> None:
        """Have ``method`` called when all calls before are through."""
        if self._thread is None:
            # A tracker that hangs must not keep the process from ending.
            self._thread = threading.Thread(target=self._work, name=f"kway-tracker-{self.name}", daemon=True)
            self._thread.start()
        self._calls.put((method, arguments))

    def failure(self) -> str:
        """Return what to say of a failure that was not told yet, or ``""``."""
        if not self._failure or self._said:
            return ""
        self._said = True
        return f"tracker {self.name} {self._failure}"

    def close(self, wait_s: float) -> None:
        """Wait for the calls to end, for ``wait_s`` seconds at most."""
        if self._thread is None:
            return
        self._calls.put(None)
        self._thread.join(wait_s)
        if self._thread.is_alive() and not self._failure:
            self._failure = f"had not ended after {wait_s:g} s, and is left to itself"

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            method, arguments = call
            if self._failure and not (method == "end" and self._begun):
                continue
            # Before the call: what it had opened when it failed is to be closed.
            self._begun = True
            try:
                getattr(self._tracker, method)(*arguments)
            # Whatever it is: it would end this thread without a word.
            except BaseException as error:
                at = f" at step {arguments[1]}" if method == "log" else ""
                self._failure = self._failure or (
                    f"failed in {method}{at}, and hears no more of this run: {line_of(error)}"
                )
