"""A user's own script on k ranks: each runs it from the top, as ``__main__``, and finds its place in ``env://``."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from kway.backends import backend_of
from kway.errors import UsageError
from kway.launch import address, failure
from kway.launch.as_main import working_folder
from kway.launch.crew import Crew
from kway.launch.descriptors import enough, open_missing
from kway.launch.failure import Failure
from kway.launch.init_method import ENV, VARIABLE, InitMethod, check_file
from kway.launch.interrupt import signals_raise
from kway.launch.output import Echo, to_parent
from kway.launch.process import SOURCES
from kway.launch.script_rank import Script
from kway.launch.stall import StallWatch, waited_for
from kway.launch.status import BOARD, Board
from kway.launch.temporary import needs_room, temporary_folder
from kway.paths import check_reachable

_LEAVE_S = 3.0
# As for a rank: the current folder is out of the way until the script's own path is there.
_ALONE = "import sys; sys.path.insert(0, sys.argv[1]); from kway.launch.script_alone import main; main()"


def launch(
    target: str,
    arguments: Sequence[str],
    devices: Sequence[str],
    *,
    module: bool = False,
    threads: int | None = None,
    logs: Path | None = None,
    echo: bool | Echo = True,
    stall_timeout: timedelta | None = None,
    init_method: InitMethod | None = None,
    rank_flag: str | None = None,
) -> list[str]:
    """Run the script ``target`` (with ``module``: the module of that name) in a rank for each of ``devices``.

    Returns when all ranks have left with exit code 0, with lines for the user about how they ran. A rank may come to
    the script's end, or to ``sys.exit(0)``, early as long as the others do not fail without it; one that leaves by
    ``os._exit(0)`` has failed, unless all do. A rank whose output cannot be flushed at the end leaves with Python's
    exit code for that, 120: a failure, but never in place of another rank's. One device is one rank without rank
    variables, so that the script may start ranks of its own. ``logs``: an existing folder for ``rank-N.log``.
    ``init_method``: where several ranks meet, if not at a port that is free. ``rank_flag``: a flag that the script
    gets with the local rank.
    Raises ``UsageError`` for a script that is not there or a place to meet that cannot be had, and ``RankError`` for
    the first rank in time that failed; with ``stall_timeout``, ``StallError`` for a rank that the others wait for and
    that makes no progress for so long. All ranks are gone then.
    """
    check(target, module)
    size = len(devices)
    shared = address.environment(devices, threads if size > 1 else None)
    address.check_interface(shared, backend_of(devices))
    method = init_method or InitMethod()
    if str(method) != ENV:
        shared[VARIABLE] = str(method)
    open_missing()
    with signals_raise(), _held(method) as (host, port), temporary_folder() as folder:
        with needs_room(folder):
            board = Board(folder / BOARD, size)
        own = [address.rank_variables(rank, size, port, host) if size > 1 else {} for rank in range(size)]
        with enough(size):
            crew = Crew(
                "kway.launch.script_rank",
                [shared | variables for variables in own],
                echo=to_parent(size) if echo is True else echo or None,
                logs=logs,
                folders=[folder],
            )
        watch = StallWatch(board, crew.pids, folder, stall_timeout)
        with _ended(crew) as fail:
            for rank in range(size):
                crew.send(
                    rank,
                    Script(
                        rank,
                        target,
                        module,
                        (*told_rank(rank_flag, rank), *arguments),
                        SOURCES,
                        str(folder),
                        stall_timeout is not None,
                    ),
                )
            met = _wait(crew, fail, watch, board)
    if any(met) or len(met) < size or size == 1:
        return []
    return [
        f"none of the {size} ranks has opened a job of kway's or a process group of torch's: each has run the "
        "whole script for itself, unless they met in another way; to share the work it opens a job (kway.parallel, "
        "kway.train)"
    ]


def check_meeting(method: InitMethod) -> None:
    """Raise ``UsageError`` where ranks of this machine cannot meet there."""
    with _held(method):
        pass


@contextlib.contextmanager
def _held(method: InitMethod) -> Iterator[tuple[str, int]]:
    """Keep an address for rank 0: the one that is named, or a port that is free."""
    if method.path is not None:
        check_file(method.path)
    host = method.host or address.LOOPBACK
    with address.reserved_port(host, method.port) as port:
        yield host, port


def told_rank(flag: str | None, rank: int) -> list[str]:
    """Return the argument by which a script hears its local rank, as from torch's old launcher; none without flag."""
    return [f"{flag}={rank}"] if flag else []


def replace_this_process(
    target: str, arguments: Sequence[str], devices: Sequence[str], *, module: bool = False
) -> None:
    """Become ``python target arguments...`` on one device: no rank variables, the same terminal and signals.

    Only an error of kway's that the script does not catch ends it as on several devices: with the error's exit code.
    Does not return. Raises ``UsageError`` as ``launch`` does.
    """
    check(target, module)
    environment = address.environment(devices, None)
    sys.stdout.flush()
    sys.stderr.flush()
    command = [
        sys.executable,
        "-P",
        "-c",
        _ALONE,
        SOURCES,
        "module" if module else "file",
        target,
        *arguments,
    ]
    os.execve(sys.executable, command, environment)


def check(target: str, module: bool) -> None:
    """Raise ``UsageError`` where there is nothing to run under this name."""
    if not module:
        check_reachable("script", Path(target))
        if not Path(target).is_file():
            raise UsageError(f"no file {target}", "kway launch runs a Python script, or -m MODULE")
        return
    missing = _missing(target)
    if missing is not None:
        raise UsageError(
            f"no module {missing!r}", "kway launch -m takes a module that this Python can import"
        )


def _missing(target: str) -> str | None:
    """Return the first part of a module's name that is not there; ``None`` where all are, or it cannot be known.

    Nothing is imported: packages of the user's are only run in ranks.
    """
    parts = target.split(".")
    if not all(parts):
        return target
    places: Sequence[str] | None = [working_folder(), *sys.path]
    for count in range(1, len(parts) + 1):
        name = ".".join(parts[:count])
        if places is None:  # what is in front of it is no package
            return name
        try:
            spec = PathFinder.find_spec(name, list(places)) or _installed(
                name, None if count == 1 else places
            )
        except KeyError:  # a folder without code inside another: Python wants to have imported that
            return None
        if spec is None:
            return name
        places = spec.submodule_search_locations
    return None


def _installed(name: str, places: Sequence[str] | None) -> ModuleSpec | None:
    """Ask all that finds modules in this Python: packages that are installed in place need not be on its path."""
    # One without the method is passed over, as Python does itself.
    asked = (getattr(finder, "find_spec", None) for finder in sys.meta_path)
    found = (find(name, places, None) for find in asked if find is not None)
    return next((spec for spec in found if spec is not None), None)


@contextlib.contextmanager
def _ended(crew: Crew) -> Iterator[Callable[[int], None]]:
    """End the crew with the block. The function that it gives names a failed rank, whose exit handlers run."""
    failed: list[int] = []
    try:
        yield failed.append
    except BaseException:
        crew.end(leave=_LEAVE_S if failed else 0.0, only=failed[0] if failed else None)
        raise
    crew.end(leave=_LEAVE_S)


def _wait(crew: Crew, fail: Callable[[int], None], watch: StallWatch, board: Board) -> list[bool]:
    """Wait for all ranks; return of those that came to the script's end whether they have met others."""
    left: dict[int, int] = {}
    done: dict[int, bool] = {}
    messages = crew.listen()
    for rank, kind, value in messages:
        if kind == "done":
            done[rank] = bool(value)
        elif kind == "ended" and failure.is_leaving(value, rank in done):
            # The script is through either way: what becomes of the others counts first.
            left[rank] = value
            if len(left) == crew.size:
                break
        elif kind in {"failure", "ended"}:
            found = crew.first_failure(messages, failure.of_message(rank, kind, value), done)
            if found.is_consequence and left:
                # Nobody failed before: the others missed the rank that was already done.
                found = failure.of_leaving(*next(iter(left.items())))
            fail(found.rank)
            error = failure.to_error(_compared(found, board))
            # An error of kway's, too, comes with the lines of the script that led to it.
            error.traceback = found.traceback
            raise error
        elif kind == "quiet":
            watch.look(crew.note)
    crew.drain()
    skipped = [rank for rank in left if rank not in done]
    if done and skipped:
        # Some came to the end of the script, so these did not: os._exit(0) on the way.
        raise failure.to_error(failure.of_exit_status(skipped[0], 0))
    for rank, status in left.items():
        if status:
            raise failure.to_error(failure.of_exit_status(rank, status))
    return [*done.values()]


def _compared(found: Failure, board: Board) -> Failure:
    """Add to a rank that is blamed for leaving early who waited for it: that one may have done too much."""
    if not found.left_early:
        return found
    waited = waited_for(found.rank, board.read())
    return replace(found, cause=f"{found.cause}; {waited}") if waited else found
