"""What a step gave, as parts and as one vector."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

Tensor = torch.Tensor


def joined(
    loss: Tensor, weight: Tensor, losses: Tensor, asked: Tensor | None, calls: Tensor | None
) -> Tensor:
    """Return parts of an ``Outcome``, of one dtype, as one vector in this order, without those that are not there."""
    parts = (loss, weight, losses, asked, calls)
    return torch.cat([part.view(-1) for part in parts if part is not None])


def apart(
    numbers: Tensor, lengths: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Take apart what ``joined`` returns: see ``Outcome``.

    ``lengths``: of ``losses``, ``asked`` and ``calls``, 0 for what is not there.
    """
    loss, weight, losses, asked, calls = torch.split(numbers, [1, 1, *lengths])
    return (
        loss.view(()),
        weight.view(()),
        losses,
        asked if len(asked) else None,
        calls if len(calls) else None,
    )


@dataclass(frozen=True)
class Outcome:
    """What a step gave. ``loss``: the loss of the global batch (scalar tensor on the device); ``weight``: the
    sum of its weights; ``losses``: the sum of each share by itself, to say where a loss broke.

    ``together``: all of these as one vector, where they lie so already.
    ``asked``: what each rank asked for beside its gradients (``StepCore.asked``), shape (ranks,), on the device;
    ``calls``: the fingerprint of each rank's collectives; ``None`` where no gradients were reduced, and in steps that
    do not tell it.
    """

    loss: Tensor
    weight: Tensor
    losses: Tensor
    asked: Tensor | None = None
    calls: Tensor | None = None
    together: Tensor | None = None

    def plus(self, penalty: Tensor) -> "Outcome":
        """Return the same with a penalty in the loss."""
        return replace(self, loss=self.loss + penalty, together=None)

    @property
    def pair(self) -> Tensor:
        """Loss and weight in one tensor of shape (2,)."""
        if self.together is not None:
            return self.together[:2]
        return torch.stack([self.loss.double(), self.weight.double()])

    def packed(self) -> Tensor:
        """Return all numbers as one vector, in float64 where they are of several dtypes."""
        if self.together is not None:
            return self.together
        parts = self.loss, self.weight, self.losses, self.asked, self.calls
        if len({part.dtype for part in parts if part is not None}) == 1:
            return joined(*parts)
        asked, calls = (None if part is None else part.double() for part in (self.asked, self.calls))
        return joined(self.loss.double(), self.weight.double(), self.losses.double(), asked, calls)

    def unpacked(self, numbers: Tensor) -> "Outcome":
        """Return the outcome that ``packed`` made ``numbers`` of, where its parts had the shapes of these.

        It is taken apart when somebody asks for one of the parts, which most steps are spared.
        """
        lengths = [0 if part is None else len(part) for part in (self.losses, self.asked, self.calls)]
        return _Packed.of(numbers, lengths, self.loss.dtype)


class _Packed(Outcome):
    """An outcome that is one vector until it is asked for more than loss and weight together."""

    @classmethod
    def of(cls, numbers: Tensor, lengths: Sequence[int], dtype: torch.dtype) -> "_Packed":
        """Make one of ``numbers``. ``lengths``: see ``apart``; ``dtype``: of the loss."""
        made = object.__new__(cls)
        vars(made).update(_numbers=numbers, _form=(lengths, dtype))
        return made

    @property
    def pair(self) -> Tensor:
        """Loss and weight in one tensor of shape (2,)."""
        numbers: Tensor | None = vars(self).get("_numbers")
        return super().pair if numbers is None else numbers[:2]

    def __getattribute__(self, name: str) -> Any:
        own = object.__getattribute__(self, "__dict__")
        if name in Outcome.__dataclass_fields__ and name not in own:
            numbers, (lengths, dtype) = own["_numbers"], own["_form"]
            loss, weight, losses, asked, calls = apart(numbers, lengths)
            own.update(vars(Outcome(loss.to(dtype), weight, losses, asked, calls, numbers)))
        return object.__getattribute__(self, name)
