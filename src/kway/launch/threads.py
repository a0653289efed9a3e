"""Ranks that are threads of this process: started together, gone together, the first failure in time."""

import threading
from collections.abc import Callable
from typing import Any

from kway.launch.meeting import LeftError, Meeting

# How long ranks have to come to where they meet, once the run is to end.
_LEAVE_S = 10.0


def run(task: Callable[[int], Any], meeting: Meeting) -> list[Any]:
    """Call ``task(rank)`` in a thread for each rank of ``meeting``; return the results by rank.

    Raises what the first rank to fail raised, as it is. What interrupts the wait (Ctrl-C) ends the ranks where they
    meet next: a thread cannot be ended from outside, and one that never comes there is left behind.
    """
    results: dict[int, Any] = {}

    def body(rank: int) -> None:
        try:
            meeting.begin(rank)
            results[rank] = task(rank)
            meeting.end(rank)
        except LeftError as left:
            # It may have the turn still; whoever failed came first.
            meeting.fail(rank, left)
        except BaseException as error:
            meeting.fail(rank, error)
        finally:
            meeting.leave()

    threads = [
        threading.Thread(target=body, args=(rank,), name=f"kway-rank-{rank}", daemon=True)
        for rank in range(meeting.size)
    ]
    try:
        for thread in threads:
            thread.start()
        # Not by ``join``: once it was interrupted, Python 3.11 takes the thread for one that has ended.
        meeting.until_left(meeting.size)
    except BaseException as interruption:
        meeting.fail(None, interruption)
        begun = [thread for thread in threads if thread.ident is not None]
        for thread in begun if meeting.until_left(len(begun), _LEAVE_S) else ():
            thread.join()
        raise
    for thread in threads:
        thread.join()
    if meeting.failure is not None:
        rank, error = meeting.failure
        if not hasattr(error, "headline"):
            error.add_note(f"on rank {rank} of {meeting.size}, which are threads of one process")
        raise error
    return [results[rank] for rank in range(meeting.size)]
