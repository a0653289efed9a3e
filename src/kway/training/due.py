"""What is due after a step of a run, or after an epoch, as far as it is known before."""

from collections.abc import Callable
from typing import NamedTuple

from kway.training.spec import TrainSpec


class Due(NamedTuple):
    """What follows a step. ``ends``: the run has then taken all its steps; ``ends_epoch``: so has the epoch.
    ``looks``: all there is to know is looked at then.
    """

    logs: bool = False
    validates: bool = False
    saves: bool = False
    ends_epoch: bool = False
    ends: bool = False
    looks: bool = False


NOTHING = Due()


class Agenda:
    """What ``spec`` wants when. ``steps_of``: steps of an epoch (from 0), ``None`` where nobody knows before its end.

    What shows only in a step is none of it: the end of such an epoch, a wish of a rank, an early stop.
    """

    def __init__(self, spec: TrainSpec, steps_of: Callable[[int], int | None]) -> None:
        self._spec, self._steps_of = spec, steps_of
        saving = spec.checkpoint_every
        # What goes by the clock is a wish of the rank that has it.
        self._saving = None if saving is None or saving.unit == "seconds" else saving
        # Looked at around every step, so that it must cost next to nothing. 0: never.
        self._full, self._logs_each = spec.steps, spec.log_every
        self._validates_each, self._saves_each = (
            every.count if every is not None and every.unit == "steps" else 0
            for every in (spec.validate_every, self._saving)
        )

    def after_step(self, epoch: int, step: int, steps: int) -> Due:
        """Return what is due after step ``step`` of ``epoch``, both from 0, with which the run has taken ``steps``."""
        full = steps == self._full
        logs = full or steps % self._logs_each == 0
        validates = self._validates_each and steps % self._validates_each == 0
        saves = self._saves_each and steps % self._saves_each == 0
        ends_epoch = step + 1 == self._steps_of(epoch)
        if not (logs or validates or saves or ends_epoch):
            return NOTHING
        ends = full or (ends_epoch and self.is_last(epoch))
        looks = bool(validates or saves or ends_epoch or ends)
        return Due(logs, bool(validates), bool(saves), ends_epoch, ends, looks)

    def validates_after(self, epoch: int, steps: int) -> bool:
        """Whether a validation is due after ``epoch``, with which the run has taken ``steps`` steps."""
        return self._spec.validate_every.due(steps, epoch + 1)

    def saves_after(self, epoch: int) -> bool:
        """Whether a save is due after ``epoch``, beside those that were due after its steps."""
        saving = self._saving
        return saving is not None and saving.unit == "epochs" and saving.due(0, epoch + 1)

    def is_last(self, epoch: int) -> bool:
        """Whether it is the last epoch, unless the run ends before."""
        return epoch == self._spec.epochs - 1

    def is_full(self, steps: int) -> bool:
        """Whether ``steps`` steps are all that the run was asked for, however many epochs are left."""
        return steps == self._full
