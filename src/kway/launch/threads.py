"""Ranks that are threads of this process: started together, gone together, the first failure in time."""

import threading
from collections.abc import Callable
from typing import Any

from kway.launch.one_run import make_part
from kway.launch.shared_process import LeftError, SharedProcess

# How long ranks have to come to where they meet, once the run is to end.
_LEAVE_S = 10.0


def run(task: Callable[[int], Any], process: SharedProcess) -> list[Any]:
    """Call ``task(rank)`` in a thread for each rank of ``process``; return the results by rank.

    Raises what the first rank to fail raised, as it is. What interrupts the wait (Ctrl-C) ends the ranks where they
    meet next: a thread cannot be ended from outside, and one that never comes there is left behind.
    """
    results: dict[int, Any] = {}

    def body(rank: int) -> None:
        try:
            process.begin(rank)
            results[rank] = task(rank)
            process.end(rank)
        except LeftError as left:
            # It may have the turn still; whoever failed came first.
            process.fail(rank, left)
        except BaseException as error:
            process.fail(rank, error)
        finally:
            process.leave()

    threads = [
        make_part(threading.Thread(target=body, args=(rank,), name=f"kway-rank-{rank}", daemon=True))
        for rank in range(process.size)
    ]
    try:
        for thread in threads:
            thread.start()
        # Not by ``join``: once it was interrupted, Python 3.11 takes the thread for one that has ended.
        process.until_left(process.size)
    except BaseException as interruption:
        process.fail(None, interruption)
        begun = [thread for thread in threads if thread.ident is not None]
        for thread in begun if process.until_left(len(begun), _LEAVE_S) else ():
            thread.join()
        raise
    for thread in threads:
        thread.join()
    if process.failure is not None:
        rank, error = process.failure
        if not hasattr(error, "headline"):
            error.add_note(f"on rank {rank} of {process.size}, which are threads of one process")
        raise error
    return [results[rank] for rank in range(process.size)]
