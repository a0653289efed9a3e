"""When a figure is better, and when it has not become better for too long."""

import math
from dataclasses import dataclass
from typing import Any


def improved(name: str, value: float, best: float | None) -> bool:
    """Whether ``value`` is better than ``best`` (``None``: there was none before).

    Figures whose names end in ``loss`` are best when small, others when large; NaN is worse than any number.
    """
    if best is None:
        return True
    if math.isnan(value) or math.isnan(best):
        return math.isnan(best) and not math.isnan(value)
    return value < best if name.endswith("loss") else value > best


@dataclass
class EarlyStop:
    """Ends a run whose figure ``name`` was not better than its best in ``patience`` validations in a row."""

    name: str
    patience: int
    best: float | None = None
    waited: int = 0

    def state(self) -> list[Any]:
        """Return what later decisions depend on."""
        return [self.name, self.best, self.waited]

    def load(self, state: list[Any]) -> None:
        """Go on from what ``state`` gave, unless it waited for another figure."""
        if state[0] == self.name:
            self.best, self.waited = state[1:]

    def judge(self, value: float) -> bool:
        """Take in one validation's figure, the same number on all ranks; return whether to stop."""
        if improved(self.name, value, self.best):
            self.best, self.waited = value, 0
        else:
            self.waited += 1
        return self.is_over

    @property
    def is_over(self) -> bool:
        """Whether the figure has not become better for too long."""
        return self.waited >= self.patience
