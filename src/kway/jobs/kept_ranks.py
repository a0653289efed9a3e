"""Ranks that several experiments use: started when first needed, kept for the next one, gone at the end."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import timedelta
from types import TracebackType
from typing import Any, Self

from kway.jobs.place import Place, choose, rank_threads
from kway.launch.local import Ranks

PRELOAD = ("torch", "kway.measuring.collective_ranks")


class KeptRanks:
    """Calls ``task(context, *arguments)`` on one rank for each of a device set, and returns the results by rank.

    Each rank has the threads that a run gives it. ``cpu_ranks``: CPU ranks that are already there.
    """

    def __init__(self, cpu_ranks: Any = None) -> None:
        self._given = cpu_ranks
        self._started: dict[tuple[str, ...], Ranks] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # What one close raises keeps no other from being ended.
        with ExitStack() as ends:
            for ranks in self._started.values():
                ends.callback(ranks.close, kill=kind is not None)

    def __call__(
        self,
        device_set: Sequence[str],
        task: Callable[..., Any],
        *arguments: Any,
        limit_s: float | None = None,
    ) -> list[Any]:
        """See the class. Raises what ``launch.local.Ranks.run`` raises, ``StallError`` where the task has not ended
        after ``limit_s`` seconds; after that other ones are started.
        """
        chosen = list(device_set)
        where = Place(choose(chosen, "auto", "math"), rank_threads(chosen), None)
        return where.run(
            _begun, task, *arguments,
            ranks=self._of(chosen, where.threads),
            apart=True,
            stall_timeout=None if limit_s is None else timedelta(seconds=limit_s),
        )  # fmt: skip

    def start(self, device_set: Sequence[str], task: Callable[..., Any]) -> None:
        """Call ``task(context)`` on such ranks, unless they are there already."""
        held = self._started.get(tuple(device_set))
        if not (self._is_given(device_set) or (held is not None and held.alive)):
            self(device_set, task)

    def _is_given(self, device_set: Sequence[str]) -> bool:
        return self._given is not None and set(device_set) == {"cpu"}

    def _of(self, chosen: list[str], threads: int) -> Any:
        if self._is_given(chosen):
            return self._given
        found = self._started.get(tuple(chosen))
        if found is None or not found.alive:
            found = Ranks(chosen, threads=threads, echo=False, preload=PRELOAD)
            self._started[tuple(chosen)] = found
        return found


def _begun(context: Any, task: Callable[..., Any], *arguments: Any) -> Any:
    """Call ``task(context, *arguments)`` as one sign of life: it is watched as a whole."""
    context.status.at("measure")
    return task(context, *arguments)
