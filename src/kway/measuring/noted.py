"""What a candidate tells beside its seconds, sample by sample."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from kway.measuring.timer import Timing


@dataclass
class Noted:
    """Means over the repeats of each sample, those of calibrating among them."""

    samples: list[tuple[int, float]] = field(default_factory=list)

    def note(self, repeats: int, values: Sequence[float]) -> None:
        """Note a sample of so many repeats."""
        self.samples.append((repeats, sum(values) / len(values)))

    def of(self, timing: Timing | None) -> list[float]:
        """Return the means of all samples that were as long as those that count, of each try; none of what was left."""
        return [] if timing is None else [mean for repeats, mean in self.samples if repeats == timing.repeats]


def costs_something(seconds: Sequence[float]) -> bool:
    """Whether a difference of times says what something costs: it may come out at 0 or below, which says nothing."""
    return bool(seconds) and median(seconds) > 0


def free(name: str, found: Mapping[str, Sequence[float]]) -> list[str]:
    """Say for a record which of ``found`` (seconds by what they are of) were measured and came out at 0 or below."""
    said = [of for of, seconds in found.items() if seconds and not costs_something(seconds)]
    return [f"{name}: left out, as it came out at 0 or below: {', '.join(said)}"] if said else []
