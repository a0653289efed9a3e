"""What a check decides: what was measured fastest is the plan, and sentences on predictions say that they are."""

from collections.abc import Sequence
from typing import Any

from kway.planned import one_device
from kway.planning.explain import EVEN
from kway.planning.order import APART, sample_s

Row = dict[str, Any]


def fastest(rows: Sequence[Row]) -> int | None:
    """Return the place of the candidate whose samples were measured to take least; ``None``: none was measured.

    Of those that may be chosen: not of more CPU ranks than cores, unless there are no others.
    """
    fit = [place for place, row in enumerate(rows) if row["fits"]]
    may = [place for place in fit if rows[place].get("eligible", True)] or fit
    measured = [place for place in may if rows[place].get("measured_step_s")]
    return min(measured, key=lambda place: sample_s(rows[place], "measured_step_s"), default=None)


def reasons(rows: Sequence[Row], predicted: int, chosen: int) -> list[str]:
    """Return the sentence of each row after a check: those that measured times do not bear out say what they are of.

    ``rows``: all candidates, ranked, each with its sentence; ``predicted``: which one was the plan before the check,
    and ``chosen`` after it.
    """
    return [_reason(row, place, rows, predicted, chosen) for place, row in enumerate(rows)]


def _reason(row: Row, place: int, rows: Sequence[Row], predicted: int, chosen: int) -> str:
    text = str(row["reason"])
    if not row.get("eligible", True):
        return text
    # Each sentence compares with these.
    others = rows if place == predicted else [rows[predicted], one_device(rows, row)]
    borne_out = not any(other is not None and _opposed(row, other) for other in others)
    if borne_out and (place not in (predicted, chosen) or predicted == chosen):
        return text
    said = text if text.startswith("predicted ") else f"by prediction {text}"
    return f"measured fastest; {said}" if place == chosen else said


def _opposed(row: Row, other: Row) -> bool:
    """Whether two candidates were measured more than a tenth apart, and not predicted to be so in that order."""
    if not (row.get("measured_step_s") and other.get("measured_step_s")):
        return False
    measured = sample_s(row, "measured_step_s") / sample_s(other, "measured_step_s")
    predicted = sample_s(row, "step_s") / sample_s(other, "step_s")
    if measured > 1 + APART:
        return predicted < 1 + EVEN
    return measured < 1 / (1 + APART) and predicted > 1 / (1 + EVEN)
