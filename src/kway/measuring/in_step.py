"""Timing on ranks: all begin together, the slowest counts, and every rank's timer decides the same."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from kway.comm.group import Group
from kway.errors import line_of
from kway.measuring.noted import Noted
from kway.measuring.reference import reference
from kway.measuring.timer import Candidate, Clock, Policy, Reading, Timer, Work
from kway.measuring.work import Call


class InStep:
    """One clock for a group of ranks, which is rank 0's, and work whose seconds are those of the slowest.

    ``group``: over CPU memory (Gloo); all ranks of it make the same calls. ``level``: called before the clock of a
    rank starts, where ranks have to meet on their devices as well.
    """

    def __init__(self, group: Group, clock: Clock = time.perf_counter) -> None:
        self._group, self._own = group, clock
        self._now = 0.0
        self.slowest(0.0)

    def clock(self) -> float:
        """Return the time at which the ranks last agreed on it: the same on all."""
        return self._now

    def slowest(self, seconds: float, error: str = "") -> float:
        """Return the largest ``seconds`` of all ranks, and let the clock go on. A collective.

        Raises ``RuntimeError`` on every rank where one of them has an ``error``, with the first one's.
        """
        now = self._own() if self._group.rank == 0 else float("-inf")
        said = torch.tensor([seconds, now, float(bool(error))], dtype=torch.float64)
        dist.all_reduce(said, dist.ReduceOp.MAX, group=self._group.handle)
        found, self._now, failed = said.tolist()
        if failed:
            raise RuntimeError(next(text for text in self._group.objects(error) if text))
        return float(found)

    def work(self, make: Callable[[], Work], level: Call = lambda: None) -> Work:
        """Return work that ranks begin together. What it needs is made when it is first done.

        What one rank cannot make, or raises before it meets the others, none of them does.
        """
        held: list[Work] = []

        def run(count: int) -> float:
            if not held:
                _, error = _attempt(lambda: held.append(make()))
                self.slowest(0.0, error)
            self._group.barrier()
            level()
            return self.slowest(*_attempt(lambda: held[0](count)))

        return run

    def repeats(
        self, make: Callable[[], Callable[[], tuple[float, ...]]], cost: Callable[..., float], noted: Noted
    ) -> Work:
        """Return work that ranks begin together, and that tells of each repeat more than how long it took.

        ``make`` returns a call that does it once and returns numbers. ``cost`` makes one of the largest of each number
        over the ranks, and ``noted`` gets its mean over the repeats, on every rank the same.
        """
        held: list[Callable[[], tuple[float, ...]]] = []

        def run(count: int) -> float:
            if not held:
                _, error = _attempt(lambda: held.append(make()))
                self.slowest(0.0, error)
            told: list[tuple[float, ...]] = []

            def repeat() -> float:
                begun = time.perf_counter()
                told.extend(held[0]() for _ in range(count))
                return time.perf_counter() - begun

            self._group.barrier()
            seconds = self.slowest(*_attempt(repeat))
            most = torch.tensor(told, dtype=torch.float64)
            dist.all_reduce(most, dist.ReduceOp.MAX, group=self._group.handle)
            noted.note(count, [cost(*row) for row in most.tolist()])
            return seconds

        return run

    def time(self, candidates: Sequence[Candidate], device: str, policy: Policy) -> Reading:
        """Time candidates made of ``work``, beside a reference workload that each rank does on ``device``, its own or
        the CPU: where the candidates' time is spent.
        """
        watched = self.work(lambda: reference(device))
        watched(1)  # a GPU loads its libraries now
        return Timer(policy, self.clock).time(candidates, watched)


class Remaining:
    """What is left of a budget in seconds that began to run at ``asked_at`` (``time.time()`` of the same machine),
    before the ranks were started. At least ``least`` of it is left for measuring, however long they took to come.
    """

    def __init__(self, in_step: InStep, policy: Policy, asked_at: float, least: float = 0.4) -> None:
        gone = in_step.slowest(max(0.0, time.time() - asked_at))
        self._in_step, self._policy = in_step, policy
        self._ends = in_step.clock() + max(policy.seconds - gone, least * policy.seconds)

    def meet(self) -> None:
        """Wait until all ranks are here, and look at the clock again. A collective."""
        self._in_step.slowest(0.0)

    def part(self, weight: float, of: float) -> Policy:
        """Return the policy for a set that weighs ``weight`` of what is still to come, which weighs ``of``."""
        left = max(0.0, self._ends - self._in_step.clock())
        return replace(self._policy, seconds=left * weight / of)


def control(world: Any, ranks: int, everyone: bool = True) -> Group | None:
    """Return a group over CPU memory of the first ``ranks`` ranks, ``None`` on the others. A collective of all ranks.

    ``everyone``: it has all ranks; then a default group over Gloo is that group.
    """
    if everyone and world.backend == "gloo":
        return Group(world.rank, world.size)
    handle = dist.new_group(list(range(ranks)), backend="gloo")
    return Group(world.rank, ranks, handle) if world.rank < ranks else None


def _attempt(do: Callable[[], Any]) -> tuple[float, str]:
    """Return what it returns as a number, and in which way it failed, or ``""``."""
    try:
        return float(do() or 0.0), ""
    except Exception as error:
        return 0.0, line_of(error)
