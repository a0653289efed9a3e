"""Where ranks that are threads of one process wait for each other, and whose turn it is to use what a process has once.

A process has one generator of random numbers for its CPU, one set of torch's flags, one run of the user's code. A rank
that has the turn finds them as it left them; it gives the turn away where it waits for the others, and nowhere else.
"""

import threading
from collections.abc import Callable, Collection, Hashable
from typing import Any, NamedTuple

Undo = Callable[[], None]


class LeftError(BaseException):
    """Another rank of this process has failed, and this one has nothing to go on for. Not for code that catches
    ``Exception``: it is no error of this rank's.
    """


class _Wait(NamedTuple):
    rank: int
    # Completes "waits ...".
    what: object
    is_so: Callable[[], bool]


class SharedProcess:
    """A process of ``size`` ranks that are threads of it: where they wait for each other, and whose turn it is.

    ``held``: takes note of what a process has once, and returns what puts it back. ``drawing``: returns what says
    whether random numbers were drawn since. All methods but ``fail`` and ``until_left`` are called by a rank,
    or on its behalf.

    What a rank waits for, another rank has to do. Once all that are not over wait, and none for what has come about
    meanwhile, nobody will: ``LookupError`` says what each waits for.
    """

    def __init__(
        self, size: int, held: Callable[[], Undo], drawing: Callable[[], Callable[[], bool]]
    ) -> None:
        self.size = size
        self._held, self._drawing = held, drawing
        self._changed = threading.Condition()
        self._kept = [held()] * size
        self._owner: int | None = None
        self._holder: int | None = None
        self._posts: dict[Hashable, dict[int, Any]] = {}
        self._seen: dict[Hashable, int] = {}
        self._over: set[int] = set()
        self._waits: dict[object, _Wait] = {}
        # Who is there, by what they are there for, until all are.
        self._here: dict[str, set[int]] = {}
        self._left = 0
        self._drawn: Callable[[], bool] = bool
        self._moved = False
        # The first failure in time: of which rank (``None``: of who waits for all of them), and what.
        self.failure: tuple[int | None, BaseException] | None = None

    def begin(self, rank: int) -> None:
        """Wait for the turn. Raises ``LeftError``."""
        with self._changed:
            self._take(rank)

    def end(self, rank: int) -> None:
        """Leave, with nothing left to do."""
        with self._changed:
            self._over.add(rank)
            self._give(rank)

    def fail(self, rank: int | None, error: BaseException) -> None:
        """Let all ranks end where they wait next, for ``error``, if it is the first."""
        with self._changed:
            self.failure = self.failure or (rank, error)
            if rank is not None:
                self._over.add(rank)
                self._give(rank)
            self._changed.notify_all()

    def leave(self) -> None:
        """Say, at the very end of a thread, that one more is gone."""
        with self._changed:
            self._left += 1
            self._changed.notify_all()

    def until_left(self, count: int, limit: float | None = None) -> bool:
        """Wait until ``count`` threads are gone, ``limit`` seconds at most; return whether they are."""
        with self._changed:
            return self._changed.wait_for(lambda: self._left >= count, limit)

    def post(self, key: Hashable, rank: int, value: Any) -> None:
        """Lay ``value`` down under ``key`` and go on."""
        with self._changed:
            posts = self._posts.setdefault(key, {})
            posts[rank] = value
            if len(posts) == self.size:
                self._changed.notify_all()

    def collect(self, key: Hashable, rank: int, what: object) -> list[Any]:
        """Wait until all ranks have posted under ``key``, return their values in rank order. Once a rank.

        ``what``: written out, it completes "rank 0 waits ...". Raises ``LeftError``, and ``LookupError`` where a rank
        has left without, or all wait for ever.
        """
        with self._changed:
            posts, has_turn = self._posts[key], self._holder == rank
            if len(posts) < self.size:
                self._give(rank)
                self._wait_for_all(rank, what, posts)
            self._seen[key] = self._seen.get(key, 0) + 1
            if self._seen[key] == self.size:
                del self._posts[key], self._seen[key]
            if has_turn and self._holder != rank:
                self._take(rank)
        return [posts[place] for place in range(self.size)]

    def spread(self, rank: int) -> None:
        """Go on without the turn, all ranks at once, as soon as all are here. Nobody may draw from the process's
        generators, nor change anything else that it has once: see ``gather``. Raises as ``collect``.
        """
        with self._changed:
            self._give(rank)
            self._together(rank, "to begin a step side by side", self._look)

    def gather(self, rank: int) -> bool:
        """Wait until all are here, then for the turn. Return whether anybody has drawn since ``spread``.

        Raises as ``collect``.
        """
        with self._changed:
            self._together(rank, "to end a step side by side", self._look_again)
            moved = self._moved
            self._take(rank)
        return moved

    def _look(self) -> None:
        self._drawn = self._drawing()

    def _look_again(self) -> None:
        self._moved = self._drawn()

    def _together(self, rank: int, what: str, act: Callable[[], None]) -> None:
        """Wait for all ranks, none of which has the turn; the last one acts before anybody goes on."""
        here = self._here.setdefault(what, set())
        if len(here) < self.size - 1:
            here.add(rank)
            try:
                self._wait_for_all(rank, what, here)
            except LookupError:
                here.discard(rank)
                raise
            return
        # Before anything says that all are here: what it raises is this rank's, and nobody goes on.
        act()
        here.add(rank)
        del self._here[what]
        self._changed.notify_all()

    def _wait_for_all(self, rank: int, what: object, there: Collection[int]) -> None:
        """Wait until all ranks are in ``there``, and not for one that has left."""
        self._wait(
            rank, what, lambda: len(there) == self.size or any(other not in there for other in self._over)
        )
        if len(there) < self.size:
            gone = min(other for other in self._over if other not in there)
            raise LookupError(f"rank {gone} has left while rank {rank} waits {what}")

    def _wait(self, rank: int, what: object, is_so: Callable[[], bool]) -> None:
        own = object()
        self._waits[own] = _Wait(rank, what, is_so)
        try:
            self._changed.wait_for(lambda: self.failure is not None or is_so() or self._is_stuck())
            if self.failure is not None:
                raise LeftError
            if not is_so():
                where = [(wait.rank, f"waits {wait.what}") for wait in self._waits.values()]
                where += [(gone, "has left") for gone in self._over]
                raise LookupError(", ".join(f"rank {place} {text}" for place, text in sorted(where)))
        finally:
            # Who hears of it goes on: the others wait until it has ended.
            del self._waits[own]

    def _is_stuck(self) -> bool:
        """Whether nobody is left to do what the others wait for. One whose wait is over need not have woken yet."""
        waits = self._waits.values()
        if len(waits) + len(self._over) < self.size:
            return False
        idle = self._over.union(wait.rank for wait in waits)
        return len(idle) == self.size and not any(wait.is_so() for wait in waits)

    def _give(self, rank: int) -> None:
        if self._holder == rank:
            self._holder = None
        self._changed.notify_all()

    def _take(self, rank: int) -> None:
        self._wait(rank, "for its turn", lambda: self._holder is None)
        self._holder = rank
        if self._owner != rank:
            if self._owner is not None:
                self._kept[self._owner] = self._held()
            self._kept[rank]()
            self._owner = rank
