"""Which rank the others wait for, and when it has kept them waiting for too long."""

import math
import time
from collections.abc import Callable, Collection, Sequence
from datetime import datetime, timedelta
from pathlib import Path

from kway.errors import MispairedError, StallError
from kway.launch import stacks
from kway.launch.status import Board, Report
from kway.units import seconds_text

# What others may wait for as long as it takes.
_EXEMPT = ("main only",)
# Starting and tuning may take this long whatever the timeout is: imports from a cold disk, the data set, the first
# rendezvous; a compilation.
START_S = 120.0
# A rank that has left, and one that waits for it in vain: so long, in case it is still inside the last collective.
LEFT_S = 5.0


def behind(reports: Sequence[Report], stopped: Collection[int] = ()) -> Report | None:
    """Return the rank that the others wait for, or ``None`` where no rank has work.

    That is the one with the fewest steps and, within a step, the fewest collectives begun. Where several have come
    equally far, one whose process is stopped, then one that is not itself waiting, then the one silent for longest.
    A rank that has no work any more is behind only where all others are inside a collective, which it left out.
    """
    there = [report for report in reports if report.phase != "idle"]
    if not any(report.phase for report in there):
        return None
    left_out = len(there) < len(reports) and all(report.waiting for report in there)
    return min(
        [report for report in reports if report.phase == "idle"] if left_out else there,
        key=lambda r: (bool(r.phase), r.step, r.calls, r.rank not in stopped, r.waiting, r.since, r.rank),
    )


def left_out(reports: Sequence[Report], now: float) -> Report | None:
    """Return a rank that has left while another waits in a collective that it never began, or ``None``.

    No time will end that. A rank that waits in a new session has begun fewer collectives there than the one that
    left took part in before: that one may still come.
    """
    gone = [report for report in reports if report.phase == "idle"]
    waits = [r for r in reports if r.waiting and r.phase != "idle" and now - r.since > LEFT_S]
    return next((late for late in gone if any(r.calls > late.calls for r in waits)), None)


def check_together(reports: Sequence[Report], now: float) -> None:
    """Raise ``MispairedError`` where all ranks wait, in collectives that do not belong together.

    No time will end that either: as many collectives were begun, and yet they are at different places, or are others.
    """
    there = [report for report in reports if report.phase != "idle"]
    if len(there) < 2 or not all(report.waiting and now - report.since > LEFT_S for report in there):
        return
    if len({r.calls for r in there}) > 1 or len({(r.step, r.phase, r.collective) for r in there}) == 1:
        return
    alike = len({(r.step, r.phase) for r in there}) == 1
    where: dict[str, list[int]] = {}
    for report in there:
        which = f" ({report.collective})" if alike else ""
        where.setdefault(f"at step {report.step}, {report.doing}{which}", []).append(report.rank)
    raise MispairedError(
        "; ".join(f"{names(ranks)} {place}" for place, ranks in where.items()),
        "ranks wait for each other in calls that do not belong together",
        "look for a call, like save or evaluate, that only some ranks make, or for a layer, like batch normalisation, "
        "that only some come to: all must, in the same order",
    )


def is_late(late: Report, reports: Sequence[Report], now: float, timeout: float) -> bool:
    """Whether the rank that is ``behind`` has given no sign for ``timeout`` seconds and ought to have.

    Work that the others are known to wait for is none of it. What a script does on its own between kway's calls
    counts only where another rank waits for it. A start gets two minutes in any case, and so does what is tried while
    a run is tuned: to compile a step, perhaps unasked, takes longer than any step.
    """
    if late.phase in _EXEMPT:
        return False
    if now - late.since < (max(timeout, START_S) if late.phase in {"", "start", "tune"} else timeout):
        return False
    if late.phase in {"", "own code"}:
        return any(r.waiting or r.phase == "start" for r in reports if r.rank != late.rank)
    return True


def described(late: Report, reports: Sequence[Report], now: float) -> str:
    """Say what the late rank was at and since when, and where the others are."""
    when = (datetime.now().astimezone() - timedelta(seconds=now - late.since)).strftime("%H:%M:%S")
    what = f"step {late.step}, {late.doing}" if late.phase else "it has not come to kway's part of the script"
    text = f"is late: {what}, no progress since {when} ({seconds_text(now - late.since)})"
    if late.phase == "idle":
        text = f"left after step {late.step} at {when}, though others wait for it"
    others = [report for report in reports if report.rank != late.rank]
    if not others:
        return text
    where: dict[str, list[int]] = {}
    for report in others:
        place = f"at step {report.step}, {report.doing}" if report.phase else "not begun"
        where.setdefault(place if report.phase != "idle" else "done", []).append(report.rank)
    return text + "; " + "; ".join(f"{names(ranks)} {place}" for place, ranks in where.items())


def waited_for(left: int, reports: Sequence[Report]) -> str:
    """Say which ranks began a collective that the rank ``left`` never came to, or ``""``: either side may be wrong."""
    own = reports[left]
    further = [r for r in reports if (r.step, r.calls) > (own.step, own.calls)]
    if not further:
        return ""
    # One that has closed its session since says how many steps it took.
    last = max(further, key=lambda r: r.step)
    where = "after" if last.phase == "idle" else "in"
    return f"{names([r.rank for r in further])} waited for it {where} step {last.step}"


def names(ranks: Sequence[int]) -> str:
    """Write ``rank 3`` or ``ranks 0, 1, 2``; many are shortened."""
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"


class StallWatch:
    """Looks at the board of ranks that are children of this process. ``pids``: theirs, by rank.

    ``timeout``: how long the rank that is behind may go without a sign (``None``: as long as it likes, and only a
    rank that has left is told of). ``folder``: where ranks answer when they are asked for their stacks.
    """

    def __init__(self, board: Board, pids: Sequence[int], folder: Path, timeout: timedelta | None) -> None:
        self._board, self._pids, self._folder = board, pids, folder
        self._timeout = math.inf if timeout is None else timeout.total_seconds()
        self._look_s = min(1.0, self._timeout / 10)
        self._looked = self._begun = 0.0

    def look(self, note: Callable[[int, str], None]) -> None:
        """Raise ``StallError`` where a rank is late; ``note`` takes that rank and the stacks of all its threads.

        Really looks once a second at most.
        """
        now = time.monotonic()
        if now - self._looked < self._look_s:
            return
        self._looked = now
        reports = self._board.read(len(self._pids))
        if not any(report.phase for report in reports):
            return
        check_together(reports, now)
        left = left_out(reports, now)
        if left is not None:
            raise StallError(left.rank, 1, described(left, reports, now))
        self._begun = self._begun or now
        # A rank that has said nothing yet has had time since another one did.
        reports = [r if r.phase else Report(r.rank, 0, 0, self._begun, "", False) for r in reports]
        late = behind(reports)
        if late is None or now - late.since < self._timeout:
            return
        late = behind(reports, {rank for rank, pid in enumerate(self._pids) if stacks.is_stopped(pid)})
        if late is None or not is_late(late, reports, now, self._timeout):
            return
        pid, text = self._pids[late.rank], described(late, reports, now)
        if stacks.is_stopped(pid):
            raise StallError(late.rank, 1, f"{text}; its process is stopped (SIGSTOP) and shows no stack")
        if stacks.has_ended(pid):
            raise StallError(late.rank, 1, f"{text}; its process has left")
        dump = stacks.ask(pid, self._folder, late.rank)
        if not dump:
            raise StallError(late.rank, 1, f"{text}; it did not answer when asked for its stack")
        note(late.rank, dump)
        stack = f"Stack of rank {late.rank} (most recent call last):\n{stacks.readable(dump)}"
        raise StallError(late.rank, 1, text, stack)
