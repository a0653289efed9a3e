"""Whether two measurements of one machine agree within the spreads that they state."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

BAR = 0.90


@dataclass(frozen=True)
class Pair:
    """One figure, ``before`` and ``now``. ``apart``: their distance, in parts of what the two spreads allow."""

    name: str
    before: float
    now: float
    apart: float

    @property
    def agrees(self) -> bool:
        """Whether value - spread to value + spread of both overlap."""
        return self.apart <= 1


def key(figure: dict[str, Any]) -> tuple[str, str, str]:
    """Return what tells a figure from others of its record."""
    return figure["experiment"], figure["name"], str(sorted(figure["parameters"].items()))


def pairs(before: Sequence[dict[str, Any]], now: Sequence[dict[str, Any]]) -> list[Pair]:
    """Return the figures that both have with a spread, those that are furthest apart first."""
    earlier = {key(figure): figure for figure in before}
    found = []
    for figure in now:
        other = earlier.get(key(figure))
        if other is None or figure["spread"] is None or other["spread"] is None:
            continue
        # Never nothing: two figures that both claim to be exact may still be equal.
        allowed = sum(abs(each["value"]) * max(each["spread"], 1e-9) for each in (figure, other))
        distance = abs(figure["value"] - other["value"])
        parameters = ", ".join(f"{name} {value}" for name, value in figure["parameters"].items())
        name = f"{figure['experiment']}: {figure['name']} ({parameters})"
        found.append(Pair(name, other["value"], figure["value"], distance / allowed if distance else 0.0))
    return sorted(found, key=lambda pair: -pair.apart)


def agreeing(found: Sequence[Pair]) -> float:
    """Return the part of the figures that agree."""
    return sum(pair.agrees for pair in found) / len(found) if found else 0.0
