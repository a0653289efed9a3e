"""One figure: what was measured under which parameters, how sure it is, and what the hardware allows."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from kway.measuring.timer import OVERHEAD, spread


@dataclass(frozen=True)
class Figure:
    """``value`` in ``unit`` is the median of ``raw``, or was computed from others, and then ``raw`` is empty.

    ``spread``: by which part of itself the value is uncertain; ``None`` where a computed one does not say. ``limit``:
    of the hardware, in the same unit, where it is known; ``share``: value / limit. ``parameters``: values by name.
    A figure with the parameter ``marks`` is a place on the x axis of the picture of the figures of that name.
    """

    experiment: str
    name: str
    parameters: dict[str, Any]
    unit: str
    value: float
    spread: float | None = None
    raw: tuple[float, ...] = ()
    limit: float | None = None
    share: float | None = None
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the figure as a record has it."""
        return {**asdict(self), "raw": list(self.raw), "notes": list(self.notes)}


@dataclass(frozen=True)
class Maker:
    """Makes the figures of one experiment. ``drift``: of the reference while they were measured."""

    experiment: str
    drift: float = 0.0
    notes: tuple[str, ...] = field(default=())

    def timed(
        self,
        name: str,
        parameters: dict[str, Any],
        unit: str,
        seconds: Sequence[float],
        value: Callable[[float], float] = lambda seconds: seconds,
        limit: float | None = None,
        notes: Sequence[str] = (),
    ) -> Figure:
        """Make a figure of samples in seconds; ``value`` turns one into the figure's unit.

        It is not known better than its samples, than the machine stood still, or than a sample is longer than clock
        and launch: the largest of the three is its spread.
        """
        raw = tuple(value(each) for each in seconds)
        middle = median(raw)
        sure = max(spread(raw), self.drift, OVERHEAD)
        return Figure(
            self.experiment, name, parameters, unit, middle, sure, raw, limit,
            None if not limit else middle / limit, (*self.notes, *notes),
        )  # fmt: skip

    def computed(
        self,
        name: str,
        parameters: dict[str, Any],
        unit: str,
        value: float,
        spread: float | None = None,
        limit: float | None = None,
        notes: Sequence[str] = (),
    ) -> Figure:
        """Make a figure that was computed from others."""
        share = None if not limit else value / limit
        return Figure(
            self.experiment, name, parameters, unit, value, spread, (), limit, share, (*self.notes, *notes)
        )
