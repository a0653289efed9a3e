"""What doing two things at once gains: from the time of each alone, and of both together."""

import math
from collections.abc import Sequence

from kway.measurements import PERCENT
from kway.measuring.figure import Figure, Maker


def share(first: float, second: float, both: float) -> float:
    """Return which part of the shorter one was hidden behind the longer: (first + second - both) / shorter.

    1 where both together take what the longer one takes; 0 where they take what one after the other does; below 0 where
    they get in each other's way more than that.
    """
    return (first + second - both) / min(first, second)


def slowdown(alone: float, beside: float) -> float:
    """Return how many times as long something takes beside something else as it does alone."""
    return beside / alone


def hidden_figure(
    make: Maker, name: str, parameters: dict[str, object], first: Figure, second: Figure, both: Figure
) -> Figure:
    """Make the figure of the share in per cent. Its spread is that of a sum of three uncertain times."""
    value = share(first.value, second.value, both.value)
    shorter = min(first.value, second.value)
    moved = math.hypot(*(figure.value * (figure.spread or 0.0) for figure in (first, second, both))) / shorter
    sure = moved / abs(value) if value else None
    return make.computed(name, dict(parameters), PERCENT, 100 * value, sure)


def slowdown_figure(
    make: Maker, name: str, parameters: dict[str, object], alone: Figure, beside: Figure
) -> Figure:
    """Make the figure of a slowdown, in times."""
    sure = math.hypot(alone.spread or 0.0, beside.spread or 0.0)
    return make.computed(name, dict(parameters), "x", slowdown(alone.value, beside.value), sure)


def find(figures: Sequence[Figure], name: str, **parameters: object) -> Figure | None:
    """Return the figure of that name with at least these parameters, where it was measured."""
    return next(
        (
            figure
            for figure in figures
            if figure.name == name and parameters.items() <= figure.parameters.items()
        ),
        None,
    )
