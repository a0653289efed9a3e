"""What a training run is asked to do, beyond its job and plan."""

import re
from dataclasses import dataclass

from kway.errors import UsageError
from kway.job import Job
from kway.records import Plan


@dataclass(frozen=True)
class Interval:
    """Every ``count`` epochs, or every ``count`` optimizer steps."""

    count: int
    unit: str

    def due(self, steps: int, epochs: int | None) -> bool:
        """Whether it is time after ``steps`` steps of the run; ``epochs`` is set only at the end of an epoch."""
        if self.unit == "steps":
            return steps % self.count == 0
        return epochs is not None and epochs % self.count == 0


def interval(what: str, value: int | str) -> Interval:
    """Read ``3`` (epochs) or ``"200steps"``. Raises ``UsageError``."""
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return Interval(value, "epochs")
    found = re.fullmatch(r"([1-9]\d*)\s*(epochs?|steps?)?", str(value).strip())
    if found is None:
        raise UsageError(f"{what}={value!r}", 'it must be a number of epochs, or like "200steps"')
    return Interval(int(found[1]), "steps" if (found[2] or "").startswith("step") else "epochs")


def positive(what: str, value: int | None) -> None:
    """Raise ``UsageError`` unless ``value`` is a whole number of at least 1 (or ``None``)."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise UsageError(f"{what}={value!r}", "it must be a whole number of at least 1")


@dataclass(frozen=True)
class TrainSpec:
    """One run: ``epochs`` epochs, or fewer where ``steps`` optimizer steps come first.

    ``folder`` receives ``weights.safetensors`` and, with ``save_best`` (the name of a validation figure),
    ``best.safetensors``. ``log_every``: optimizer steps between two ``step`` events. ``early_stop``: the
    validation figure that ends the run when it was not better in ``patience`` validations in a row.
    """

    job: Job
    plan: Plan
    folder: str
    epochs: int = 10
    steps: int | None = None
    validate_every: Interval = Interval(1, "epochs")
    log_every: int = 10
    save_best: str | None = None
    early_stop: str | None = None
    patience: int = 3
    started: str = ""

    def __post_init__(self) -> None:
        """Refuse counts that cannot work."""
        for what in ("epochs", "log_every", "patience"):
            positive(what, getattr(self, what))
        positive("steps", self.steps)
