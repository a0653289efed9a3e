"""Coarse to fine within a budget: what is measured next, what wins, and what is left out. It measures nothing."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from kway.tuning.knobs import Choice, Stage

# A candidate wins only by more than this part of the best time so far, and by more than both spread.
LEAST_GAIN = 0.01
# A winner that nobody has time to measure again wins only by more than this.
CLEAR_GAIN = 0.05
# The stage of what is measured a second time.
ONCE_MORE = "once more"
# Of what had won, and was measured again on what had become another machine.
CHANGED = "won, but the machine changed before it was measured again"
# Of what had won, and did not stay the choice.
OVERTAKEN = "the best so far, until a later one won"


@dataclass(frozen=True)
class Reading:
    """What trying a choice gave.

    ``step_s``: seconds of a step by window; ``cost_s``: seconds that trying it took, of which ``made_s`` for what is
    made once (compiling, recording); ``difference``: why it does not agree with the step as it is, or ``""``;
    ``refused``: why there is no time.
    """

    step_s: tuple[float, ...] = ()
    cost_s: float = 0.0
    made_s: float = 0.0
    difference: str = ""
    refused: str = ""

    @property
    def median_s(self) -> float:
        """The median over windows."""
        return median(self.step_s)

    @property
    def spread(self) -> float:
        """(largest - smallest) / median over windows, without the largest and the smallest where there are five."""
        held = sorted(self.step_s)[1:-1] if len(self.step_s) >= 5 else sorted(self.step_s)
        return (held[-1] - held[0]) / self.median_s


@dataclass
class Row:
    """One line of the table: a choice, its reading if there is one, and what was decided.

    ``plain``: the reading of the step as it is that it stands beside; ``None``: the first one.
    """

    stage: str
    choice: Choice
    reading: Reading | None
    verdict: str
    plain: Reading | None = None

    @property
    def is_again(self) -> bool:
        """Whether it was measured to see whether what had won wins once more."""
        return self.stage == ONCE_MORE


@dataclass
class Found:
    """``best``: the choice that won, ``{}`` for the step as it is; ``rows``: all that was looked at.

    ``whole``: whether nothing was left out for want of time. ``again``: the time of the choice by that of the step as
    is, when both were measured once more; ``None`` where they were not. ``undecided``: whether the machine changed so
    much between both times of the step as it is that this alone decided against what had won.
    """

    best: Choice
    rows: list[Row] = field(default_factory=list)
    whole: bool = True
    again: float | None = None
    undecided: bool = False


def faster(one: Reading, other: Reading) -> bool:
    """Whether ``one`` is faster than ``other`` by more than what both are uncertain by."""
    uncertain = (one.spread * one.median_s + other.spread * other.median_s) / 2
    return one.median_s < other.median_s - max(LEAST_GAIN * other.median_s, uncertain)


def search(
    stages: Iterable[Stage],
    measure: Callable[[Choice], Reading],
    cost: Callable[[Choice], float],
    again: Callable[[Choice], float],
    left: Callable[[], float],
    start: Reading,
) -> Found:
    """Try the changes of each stage on the best choice so far; keep what is faster and agrees.

    ``measure`` tries a choice; ``cost`` says in how many seconds, about; ``again`` how long it takes to measure one
    that was tried; ``left`` the seconds that are left; ``start``: the reading of the step as it is. At the end the
    winner and the step as it is are measured once more, and the winner has to win again. What would leave no time for
    that, whoever wins, is not begun; where there is none all the same, since something took longer than ``cost`` said,
    the winner has to have won by ``CLEAR_GAIN``.
    """
    found, readings = Found({}), {_key({}): start}
    found.rows.append(Row("", {}, start, ""))
    best = start
    for stage in stages:
        winner, its = found.best, best
        for change in stage.changes:
            choice = {**found.best, **change}
            if _key(choice) in readings:
                continue
            needs, rest = cost(choice), left()
            confirms = again({}) + max(again(choice), again(winner))
            if needs + confirms > rest:
                verdict = (
                    f"not tried: it takes about {needs:.0f} s, and to measure what wins once more {confirms:.0f} s, "
                    f"{max(0.0, rest):.0f} s are left"
                )
                found.rows.append(Row(stage.name, choice, None, verdict))
                found.whole = False
                continue
            reading = readings[_key(choice)] = measure(choice)
            verdict = _verdict(reading, its, start)
            found.rows.append(Row(stage.name, choice, reading, verdict))
            if not verdict:
                winner, its = choice, reading
        found.best, best = winner, its
    if found.best and again({}) + again(found.best) <= left():
        _confirm(found, measure, start)
    elif found.best and best.median_s > (1 - CLEAR_GAIN) * start.median_s:
        _take_back(found, "no time to measure it again, and the gain is small")
    for row in found.rows:
        if not row.verdict:
            row.verdict = "chosen" if row.choice == found.best else OVERTAKEN if row.choice else "baseline"
    return found


def _verdict(reading: Reading, best: Reading, plain: Reading) -> str:
    """Return why a choice does not win over the ``best`` so far, or ``""``.

    Beside ``plain``, the step as it is, the table has the ratio; beside another one the verdict has it.
    """
    if reading.refused:
        return f"refused: {reading.refused}"
    if reading.difference:
        return f"discarded: {reading.difference}"
    if faster(reading, best):
        return ""
    how = "slower" if reading.median_s > best.median_s else "no faster"
    if best is plain:
        return f"{how} than the step as it is"
    return f"{how} than the best so far ({reading.median_s / best.median_s:.3f} of it)"


def _confirm(found: Found, measure: Callable[[Choice], Reading], start: Reading) -> None:
    """Measure the step as it is and the winner again, one after the other: a machine that drifted chose by chance."""
    before, again = measure({}), measure(found.best)
    plain = start
    if before.step_s and again.step_s and not again.difference:
        # Of both readings of the step as it is, the faster one counts.
        plain = min(start, before, key=lambda reading: reading.median_s)
        found.again = again.median_s / plain.median_s
        if faster(again, plain):
            return
        found.undecided = _changed(start, before, again)
    lost, why = found.best, f"{_verdict(again, plain, plain)}, when measured again"
    if found.undecided:
        drift, beside = before.median_s / start.median_s, again.median_s / before.median_s
        why = (
            f"not decided: the machine changed meanwhile (the step as it is took {drift:.2f} times its first time, and "
            f"this {beside:.2f} of that)"
        )
    elif not before.step_s:
        why = f"the step as it is was refused ({before.refused}), when measured again"
    _take_back(found, CHANGED if found.undecided else "won, but not when measured again")
    if before.step_s:
        found.rows.append(Row(ONCE_MORE, {}, before, "baseline, measured again", plain))
    found.rows.append(Row(ONCE_MORE, lost, again, why, plain))


def _changed(start: Reading, before: Reading, again: Reading) -> bool:
    """Whether a choice is slower than the step as it is was first, but not than the one measured right ``before`` it,
    which is slower than that as well: then the moment lost, and of the choice it tells nothing. It is not chosen.
    """
    return faster(start, before) and again.median_s < (1 - LEAST_GAIN) * before.median_s


def _take_back(found: Found, verdict: str) -> None:
    """Let the step as it is be the choice, and say why at the one that had won."""
    for row in found.rows:
        if row.choice == found.best and not row.verdict:
            row.verdict = verdict
    found.best = {}


def _key(choice: Choice) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted(choice.items()))
