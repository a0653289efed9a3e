"""Everything that ranks say, as it comes, and that they end."""

import selectors
from collections.abc import Iterator, Sequence
from typing import Any

from kway.launch.process import RankProcess

_POLL_S = 0.05
_LAST_WORDS_S = 1.0


def listen(processes: Sequence[RankProcess]) -> Iterator[tuple[int, str, Any]]:
    """Yield (rank, kind, value): the ranks' own messages in order, ``ended`` (value: the exit status, as
    ``subprocess`` gives it) once for each rank that is gone, and ``quiet`` (rank -1) at least every 50 ms.
    """
    ended: set[int] = set()
    with selectors.DefaultSelector() as selector:
        for process in processes:
            if not process.inbox.closed:
                selector.register(process.sock, selectors.EVENT_READ, process)
        while True:
            for key, _ in selector.select(_POLL_S):
                yield from _messages(key.data)
                if key.data.inbox.closed:
                    selector.unregister(key.data.sock)
            for process in processes:
                # Loader workers can hold a dead rank's socket open: only the process itself tells its end.
                if process.rank not in ended and (process.inbox.closed or process.ended()):
                    ended.add(process.rank)
                    yield from _messages(process)
                    yield process.rank, "ended", _status(process)
            yield -1, "quiet", None


def _messages(process: RankProcess) -> Iterator[tuple[int, str, Any]]:
    while not process.inbox.closed and (messages := process.receive()):
        for kind, value in messages:
            yield process.rank, kind, value


def _status(process: RankProcess) -> int:
    """Wait for a rank that closed its wire; one that goes on without a wire is of no use and is ended."""
    process.wait(_LAST_WORDS_S)
    return process.status()
