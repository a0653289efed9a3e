"""Which rank is slow: how long each works on a step by itself, while the others may already wait for it."""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median, median_low

from kway.launch.status import Status

# A straggler that costs less of a step is not worth a line.
WORTH = 0.1
# The first steps of a run pay for what happens once, and a few more say nothing.
WARM_UP, LEAST, KEPT = 3, 10, 10_000
# A rank is slow that is so in every part of the run: what else a machine does may hold one up for a while.
PARTS, LEAST_OF_PART = 5, 20


@dataclass(frozen=True)
class Work:
    """What one rank does in a step. ``own_s``: its own work in seconds; ``step_s``: with the wait for the others;
    ``samples``: how many it holds. Medians over the steps. ``parts``: the same for each of ``PARTS`` parts of the
    steps, one after another; none after too few steps to tell chance from slowness.
    """

    own_s: float
    step_s: float
    samples: float
    parts: tuple["Work", ...] = ()


class OwnWork:
    """Measures this rank's own work of each step: all of it but the time spent inside collectives.

    Host time, which is the rank's work on a CPU only: a GPU is given its work ahead of time.
    """

    def __init__(self, status: Status) -> None:
        self._status = status
        self._steps: deque[tuple[float, float, int]] = deque(maxlen=KEPT)
        self._to_skip = WARM_UP
        self._begun: tuple[float, float] | None = None

    def begin(self) -> None:
        """Begin a step, with its input."""
        self._begun = time.perf_counter(), self._status.waited_s

    def end(self, samples: int) -> None:
        """End the step, of which this rank held ``samples``; of one that was not begun nothing is kept."""
        if self._begun is None:
            return
        (begun, waited), self._begun = self._begun, None
        if self._to_skip:
            self._to_skip -= 1
            return
        passed = time.perf_counter() - begun
        self._steps.append((passed - (self._status.waited_s - waited), passed, samples))

    def work(self) -> Work | None:
        """Return the medians; ``None`` after too few steps."""
        steps = list(self._steps)
        if len(steps) < LEAST:
            return None
        size = len(steps) // PARTS
        parts = [steps[start * size : (start + 1) * size] for start in range(PARTS)]
        return replace(_medians(steps), parts=tuple(map(_medians, parts)) if size >= LEAST_OF_PART else ())


def _medians(steps: Sequence[tuple[float, float, int]]) -> Work:
    own, whole, samples = zip(*steps, strict=True)
    return Work(median(own), median(whole), median(samples))


def own_work(works: Sequence[Work | None]) -> list[float] | None:
    """Return the seconds of each rank's own work a step, or ``None`` where they were not measured on all."""
    known = [work.own_s for work in works if work is not None]
    return known if len(known) == len(works) else None


def slow_ranks(found: Sequence[Work | None]) -> list[str]:
    """Return a line for each rank (in rank order) whose slowness costs over 10% of the step without it.

    A rank is slow against the lower median of all. Work that it has because its share is larger is not slowness.
    Nothing is said where a rank was not measured, after few steps, or of one that was slow for a part of them only.
    """
    works = [work for work in found if work is not None]
    if len(works) < max(2, len(found)) or not all(work.parts for work in works):
        return []
    always = set.intersection(
        *(set(_slow(part)) for part in zip(*(work.parts for work in works), strict=True))
    )
    return [line for rank, line in _slow(works).items() if rank in always]


def _slow(works: Sequence[Work]) -> dict[int, str]:
    """Return the slow ranks of one measurement, with a line for each."""
    usual = median_low([work.own_s for work in works])
    of_usual = median_low([work.samples for work in works])
    lines = {}
    for rank, work in enumerate(works):
        fair = usual * max(1.0, work.samples / of_usual) if of_usual else usual
        excess = work.own_s - fair
        without = work.step_s - excess
        if excess <= 0 or excess <= WORTH * max(without, fair):
            continue
        others = median_low([other.own_s for place, other in enumerate(works) if place != rank])
        lines[rank] = (
            f"rank {rank} is slow: its own work takes {work.own_s * 1e3:.3g} ms a step, the others' "
            f"{others * 1e3:.3g} ms (median): every step waits {excess * 1e3:.3g} ms for it"
        )
    return lines
