"""Ranks that are threads of this process: started together, gone together, the first failure in time."""

import threading
from collections.abc import Callable
from typing import Any

from kway.launch.turns import LeftError, Turns

# How long ranks have to come to where they meet, once the run is to end.
_LEAVE_S = 10.0


def run(task: Callable[[int], Any], turns: Turns) -> list[Any]:
    """Call ``task(rank)`` in a thread for each rank that takes ``turns``; return the results by rank.

    Raises what the first rank to fail raised, as it is. What interrupts the wait (Ctrl-C) ends the ranks where they
    meet next: a thread cannot be ended from outside, and one that never comes there is left behind.
    """
    results: dict[int, Any] = {}

    def body(rank: int) -> None:
        try:
            turns.begin(rank)
            results[rank] = task(rank)
            turns.end(rank)
        except LeftError as left:
            # It may have the turn still; whoever failed came first.
            turns.fail(rank, left)
        except BaseException as error:
            turns.fail(rank, error)
        finally:
            turns.leave()

    threads = [
        threading.Thread(target=body, args=(rank,), name=f"kway-rank-{rank}", daemon=True)
        for rank in range(turns.size)
    ]
    try:
        for thread in threads:
            thread.start()
        # Not by ``join``: once it was interrupted, Python 3.11 takes the thread for one that has ended.
        turns.until_left(turns.size)
    except BaseException as interruption:
        turns.fail(None, interruption)
        begun = [thread for thread in threads if thread.ident is not None]
        for thread in begun if turns.until_left(len(begun), _LEAVE_S) else ():
            thread.join()
        raise
    for thread in threads:
        thread.join()
    if turns.failure is not None:
        rank, error = turns.failure
        if not hasattr(error, "headline"):
            error.add_note(f"on rank {rank} of {turns.size}, which are threads of one process")
        raise error
    return [results[rank] for rank in range(turns.size)]
