"""What a training run is asked to do, beyond its job and plan."""

import re
from dataclasses import dataclass, field, replace
from typing import Any, Self

from kway.errors import UsageError
from kway.job import Job
from kway.records import Plan
from kway.step.scaling import LrScale
from kway.step.settings import Settings
from kway.training.wish import Wish
from kway.units import shown

PATIENCE = 3  # validations that early_stop waits where nobody says how many


@dataclass(frozen=True)
class Interval:
    """Every ``count`` epochs, optimizer steps or seconds."""

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


def saving_interval(what: str, value: int | str | None) -> Interval | None:
    """Read ``"200s"``, ``"10min"``, ``"1h"``, ``"500steps"`` or a number of epochs. Raises ``UsageError``."""
    if value is None:
        return None
    found = re.fullmatch(r"([1-9]\d*)\s*(s|min|h)", str(value).strip())
    if found is not None:
        return Interval(int(found[1]) * {"s": 1, "min": 60, "h": 3600}[found[2]], "seconds")
    try:
        return interval(what, value)
    except UsageError as error:
        raise UsageError(error.got, 'it must be like "200s", "10min", "500steps" or "1epoch"') from None


def positive(what: str, value: int | None, optional: bool = False) -> None:
    """Raise ``UsageError`` unless ``value`` is a whole number of at least 1, or with ``optional`` ``None``."""
    if optional and value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(f"{what}={shown(value)}", "it must be a whole number of at least 1")


@dataclass(frozen=True)
class TrainSpec:
    """One run: ``epochs`` epochs, or fewer where ``steps`` optimizer steps come first.

    ``folder`` receives ``weights.safetensors`` and, with ``save_best`` (the name of a validation figure),
    ``best.safetensors``. ``log_every``: optimizer steps between two ``step`` events. ``early_stop``: the
    validation figure that ends the run when it was not better in ``patience`` validations in a row.

    ``is_kept``: whether the folder outlives the run, so that checkpoints can be kept there, every
    ``checkpoint_every``, the last ``keep`` of them. ``resume``: the folder of the checkpoint to go on from.
    ``made``: what of its first weights another copy of the model made when it ran, for the files of this run.
    ``warns``: whether lines about a loss that may not add up go to standard error as well.
    ``told``: lines for the user that were known before the run began.
    ``facts``: what the job is, for checkpoints (see ``kway.training.facts``); ``subject``: for the record.
    ``tune``: how step kind and settings are to be chosen before the run begins, ``None`` for as the plan has them;
    ``as_begun``: whether a run that goes on takes them from its checkpoint; ``tuned``: what a record says of it.
    ``planned_kind``: the step kind that the run takes where nothing is known from tuning, ``None`` for the plan's.
    ``timeline``: how many steps are recorded through the profiler, ``None`` for none.
    ``per_device``: how many samples a device was to get, ``None`` where the global batch was named; ``lr_scale``: how
    the job's schedule scales the rates for it, ``None`` for not at all.
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
    patience: int = PATIENCE
    started: str = ""
    is_kept: bool = False
    checkpoint_every: Interval | None = None
    keep: int | None = None
    resume: str | None = None
    made: dict[str, str] = field(default_factory=dict)
    told: tuple[str, ...] = ()
    warns: bool = True
    facts: dict[str, Any] = field(default_factory=dict)
    subject: dict[str, Any] = field(default_factory=dict)
    tune: Wish | None = None
    as_begun: bool = False
    tuned: dict[str, Any] | None = None
    planned_kind: str | None = None
    timeline: int | None = None
    per_device: int | None = None
    lr_scale: LrScale | None = None

    def __post_init__(self) -> None:
        """Refuse counts that cannot work."""
        for what in ("epochs", "log_every", "patience"):
            positive(what, getattr(self, what))
        for what in ("steps", "keep"):
            positive(what, getattr(self, what), optional=True)

    def in_force(self) -> Self:
        """Return the run with the micro-batch that its settings leave of its job's, in its record as well."""
        job = Settings.of(self.plan.settings).on(self.job)
        return replace(self, job=job, subject={**self.subject, "micro_batch": job.micro_batch})
