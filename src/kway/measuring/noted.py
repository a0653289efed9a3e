"""What a candidate tells beside its seconds, sample by sample."""

from collections.abc import Sequence
from dataclasses import dataclass, field

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
