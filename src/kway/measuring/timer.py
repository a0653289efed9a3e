"""How a set of candidates is timed: the policy. What works, and how one waits for it, is ``work.py``.

Each candidate is calibrated (how many repeats make a sample long enough), which warms it up as well. Then rounds: every
candidate once a round, each round beginning with the next one, so that a drift of the machine meets all alike. A
reference workload is timed before, between and after the rounds; where it drifts, all rounds are done again.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

from kway.errors import line_of

# Does the work n times and returns the seconds that took, the work's end awaited.
Work = Callable[[int], float]
Clock = Callable[[], float]

# A sample is so long that clock and launch may be this part of it: no figure is known better.
OVERHEAD = 0.01
# The reference may differ by this part between the thirds of the rounds.
DRIFT = 0.05
# From such a spread of the typical candidate on, or such a drift in every try, a machine counts as too noisy.
NOISY = 0.15
MOST_REPEATS = 1 << 24
_THIRDS = 3
# A repeat longer than this part of a sample is one of work; what a shorter one costs may be its launch.
_OF_WORK = 0.1
# A repeat that is expected to take as many samples is one without being tried.
_LONG = 10


@dataclass(frozen=True)
class Policy:
    """``seconds``: the budget of a whole set, beside what first calls take more than others; ``sample_s``: least
    length of a sample; ``rounds``: samples by candidate, ``least_rounds`` where the budget has no more;
    ``tries``: how often the rounds are done where the reference drifts.
    """

    seconds: float = 10.0
    sample_s: float = 2e-3
    rounds: int = 9
    least_rounds: int = 3
    tries: int = 3


@dataclass(frozen=True)
class Candidate:
    """``run``: see ``Work``. What it needs is best made when it is first called: it may be left out.

    ``family`` and ``work``: candidates of one family take time in proportion to their work, about; so one that would
    not fit into the budget is known before it is begun. Without a family each is tried.
    """

    name: str
    run: Work
    family: str = ""
    work: float = 0.0


@dataclass(frozen=True)
class Timing:
    """``raw``: seconds of one repeat by sample, of which each had ``repeats``."""

    name: str
    repeats: int
    raw: tuple[float, ...]

    @property
    def seconds(self) -> float:
        """The median over samples."""
        return median(self.raw)

    @property
    def spread(self) -> float:
        """See ``spread``."""
        return spread(self.raw)


@dataclass(frozen=True)
class Reading:
    """What timing a set gave: ``timings`` by candidate, and ``left`` ones with the reason.

    ``drift`` of the reference in the try that counts, the calmest of ``tries``; ``seconds``: what it all took, without
    what first calls took more than others.
    """

    timings: dict[str, Timing]
    left: dict[str, str] = field(default_factory=dict)
    drift: float = 0.0
    tries: int = 1
    seconds: float = 0.0

    @property
    def spread(self) -> float:
        """That of the typical candidate."""
        return median([timing.spread for timing in self.timings.values()] or [0.0])


def noisy(readings: Sequence[Reading]) -> str:
    """Say why the figures of these sets are not to be trusted as far as others; ``""`` where they are.

    What several of them have in common is said once, with its range, how many they are and what is first in each.
    """
    drifted = [reading for reading in readings if reading.drift > DRIFT]
    spread_out = [reading for reading in readings if reading.drift <= DRIFT and reading.spread > NOISY]
    found = []
    if drifted:
        tries = max(reading.tries for reading in drifted)
        times = f"in each of {tries} tries" if tries > 1 else "and there was no time to try again"
        by = _range([reading.drift for reading in drifted])
        found.append(
            f"a reference workload drifted by {by} between rounds {times}{_where(drifted, readings)}"
        )
    if spread_out:
        over = _range([reading.spread for reading in spread_out])
        where = _where(spread_out, readings)
        found.append(f"samples of the typical candidate spread over {over} of their median{where}")
    return "; ".join(found)


def _range(values: Sequence[float]) -> str:
    low, high = f"{min(values):.0%}", f"{max(values):.0%}"
    return low if low == high else f"{low} to {high}"


def _where(some: Sequence[Reading], readings: Sequence[Reading]) -> str:
    """Name the sets, where there are others or several."""
    if len(readings) == 1:
        return ""
    # Without what tells a candidate from the others of its set.
    names = [next(iter(reading.timings), "").partition(" (")[0] for reading in some]
    text = ", ".join(dict.fromkeys(filter(None, names)))
    return f" (in {len(some)} of {len(readings)} sets that were timed{text and f': {text}'})"


def quantile(values: Sequence[float], part: float) -> float:
    """Return the value below which ``part`` of the values lie, between two of them in proportion."""
    ordered = sorted(values)
    place = part * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def spread(values: Sequence[float]) -> float:
    """Return (90th - 10th percentile) / median: how far single samples lie apart.

    Not the standard deviation, which one interrupted sample decides, nor (largest - smallest), which only grows with
    the number of samples. 0 for a single value.
    """
    return (quantile(values, 0.9) - quantile(values, 0.1)) / median(values)


def drift(reference: Sequence[float]) -> float:
    """Return (largest - smallest) / median over the medians of the thirds of a reference's samples, in their order.

    What changes slowly (clock rate, another tenant) shows as a difference between thirds; single outliers vanish in
    their medians. 0 for fewer than three samples.
    """
    if len(reference) < _THIRDS:
        return 0.0
    edges = [index * len(reference) // _THIRDS for index in range(_THIRDS + 1)]
    medians = [median(reference[start:stop]) for start, stop in pairwise(edges)]
    return (max(medians) - min(medians)) / median(medians)


@dataclass(frozen=True)
class Calibration:
    """``repeats`` make a sample of ``took`` seconds, long enough; the first call took ``extra`` more than a repeat."""

    repeats: int
    took: float
    extra: float = 0.0


def calibrate(run: Work, sample_s: float, clock: Clock = lambda: 0.0, expected: float = 0.0) -> Calibration:
    """Return how many repeats make a sample of at least ``sample_s``, and how long such a sample takes.

    The first call, which pays for memory, code and connections, does not count; unless one repeat is ``expected`` to be
    far longer than a sample, and there is nothing to find out. What takes longer by ``clock`` than it says itself,
    because its own clock stands still at times, has taken what ``clock`` says.
    """
    begun = clock()
    first = run(1)
    warm = clock() - begun
    if expected > _LONG * sample_s:
        return Calibration(1, first, max(0.0, warm - first))
    repeats = 1
    while True:
        begun = clock()
        took = run(repeats)
        if took >= sample_s or repeats >= MOST_REPEATS:
            took = max(took, clock() - begun)
            return Calibration(repeats, took, max(0.0, warm - took / repeats))
        # A quarter more than enough, so that it is enough the next time; a clock that saw nothing says little.
        wanted = math.ceil(repeats * 1.25 * sample_s / took) if took > 0 else repeats * 1000
        repeats = min(max(wanted, repeats + 1), repeats * 1000, MOST_REPEATS)


def _pace(held: Calibration, candidate: Candidate, sample_s: float) -> float:
    """Return the seconds of a unit of work; 0 of what is too short to tell: smaller ones have told nothing either."""
    once = held.took / held.repeats
    return once / candidate.work if once > _OF_WORK * sample_s else 0.0


class Timer:
    """Times sets of candidates under one policy. ``clock``: seconds, of which only differences count.

    All it decides follows from what clock and work return. Where these are agreed on by ranks (rank 0's clock, the time
    of the slowest), a timer on each rank keeps them in step without a word more.
    """

    def __init__(self, policy: Policy, clock: Clock = time.perf_counter) -> None:
        self._policy, self._clock = policy, clock

    def time(self, candidates: Sequence[Candidate], reference: Work) -> Reading:
        """Time the candidates, the cheapest of a family first. What raises, or has no time in the budget, is left.

        Raises what ``reference`` raises, and ``ValueError`` for two candidates of one name.
        """
        if len({candidate.name for candidate in candidates}) != len(candidates):
            raise ValueError("two candidates of one name")
        begun = self._clock()
        held = calibrate(reference, self._policy.sample_s)
        found, left, ends = self._calibrated(candidates, held.took, begun + self._policy.seconds)
        repeats = {name: each.repeats for name, each in found.items()}
        kept = [candidate for candidate in candidates if candidate.name in repeats]
        best: tuple[float, dict[str, list[float]]] | None = None
        tries = 0
        while kept and tries < self._policy.tries:
            before = self._clock()
            tries += 1
            # Half of what is left, so that another try has room; the last one may take the rest.
            part = 1 if tries == self._policy.tries else 2
            raw, moved = self._rounds(
                kept, repeats, (reference, held.repeats), before + (ends - before) / part
            )
            if best is None or moved < best[0]:
                best = moved, raw
            if moved <= DRIFT or self._clock() + (self._clock() - before) > ends:
                break
        moved, raw = best or (0.0, {})
        timings = {name: Timing(name, repeats[name], tuple(values)) for name, values in raw.items()}
        waited = ends - begun - self._policy.seconds
        return Reading(timings, left, moved, max(tries, 1), self._clock() - begun - waited)

    @property
    def _no_time(self) -> str:
        return f"no time for it in the {self._policy.seconds:.3g} s that there were"

    def _calibrated(
        self, candidates: Sequence[Candidate], round_s: float, ends: float
    ) -> tuple[dict[str, Calibration], dict[str, str], float]:
        """Return the calibrations by name, what is left out, and the end of the budget: what first calls take more than
        others is added to it. ``round_s``: what a round takes without candidates.
        """
        found: dict[str, Calibration] = {}
        left: dict[str, str] = {}
        pace: dict[str, float] = {}
        # By family the last that was found, and the families that were looked at again.
        paced: dict[str, Candidate] = {}
        looked: set[str] = set()
        sample_s, least = self._policy.sample_s, self._policy.least_rounds
        # What seems to take too long is looked at again behind the others, which the list then grows by.
        queue = [(candidate, False) for candidate in candidates]
        for candidate, again in queue:
            if again and candidate.family in paced.keys() - looked:
                looked.add(candidate.family)
                # One sample that was interrupted says too much of itself, and of all that have more work.
                like = paced[candidate.family]
                before, held = found[like.name], calibrate(like.run, sample_s, self._clock)
                if held.took / held.repeats < before.took / before.repeats:
                    found[like.name], round_s = held, round_s + held.took - before.took
                    pace[candidate.family] = _pace(held, like, sample_s)
            room = ends - self._clock() - least * round_s
            once = pace.get(candidate.family, 0.0) * candidate.work
            # Beside its least rounds, a candidate is called twice to be calibrated.
            if room <= 0 or (least + 2) * once > room:
                left[candidate.name] = self._no_time
                family = paced.get(candidate.family)
                if not again and family is not None and 2 * found[family.name].took < room:
                    queue.append((candidate, True))
                continue
            left.pop(candidate.name, None)
            try:
                held = calibrate(candidate.run, sample_s, self._clock, once)
            except Exception as error:
                # Too large for the device, or not implemented there: the others are still worth their figures.
                left[candidate.name] = line_of(error)
                continue
            ends += held.extra
            if candidate.family and candidate.work:
                pace[candidate.family] = _pace(held, candidate, sample_s)
            paced.pop(candidate.family, None)
            if ends - self._clock() < least * (round_s + held.took):
                left[candidate.name] = self._no_time
                continue
            found[candidate.name] = held
            round_s += held.took
            if candidate.family and candidate.work:
                paced[candidate.family] = candidate
        return found, left, ends

    def _rounds(
        self,
        kept: Sequence[Candidate],
        repeats: Mapping[str, int],
        reference: tuple[Work, int],
        ends: float,
    ) -> tuple[dict[str, list[float]], float]:
        """Do one try; return seconds of one repeat by name and round, and the drift of the reference."""
        work, count = reference
        raw: dict[str, list[float]] = {candidate.name: [] for candidate in kept}
        held = [work(count)]
        for number in range(self._policy.rounds):
            begun = self._clock()
            for place in range(len(kept)):
                candidate = kept[(place + number) % len(kept)]
                taken = repeats[candidate.name]
                raw[candidate.name].append(candidate.run(taken) / taken)
            held.append(work(count))
            took = self._clock() - begun
            if number + 1 >= self._policy.least_rounds and self._clock() + took > ends:
                break
        return raw, drift(held)
