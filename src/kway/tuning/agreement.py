"""Whether a candidate computes what the step as it is computes, but for rounding.

The rule is that of proofs (``kway.proving.compare``): the largest difference of a tensor is at most 16 times what the
step as it is differs by from itself when the samples of each batch come in another order, or 64 units of rounding of
the tensor's largest magnitude. A unit is that of the precision in which products are computed; of those of bfloat16 and
float16, which are hundredths and thousandths, 16 are allowed.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch

from kway.proving.compare import EPSILONS, NOISE_FACTOR, largest_magnitude
from kway.proving.reference import largest

Tensor = torch.Tensor

# A loss adds up over all samples: of what is allowed for a tensor this part is for it.
LOSS = 4
# Units in the last place of a kept number that its roundings may add up to.
STORED = 4
# What is allowed for a largest magnitude of 1. TF32 keeps 10 bits of the fraction.
_ALLOWED = {
    "bf16": 16 * 2.0**-7,
    "fp16": 16 * 2.0**-10,
    "tf32": EPSILONS * 2.0**-10,
    "fp32": EPSILONS * 2.0**-23,
    "fp64": EPSILONS * 2.0**-52,
}


@dataclass(frozen=True)
class Trace:
    """What some steps left: the loss of each (floats), and tensors by name.

    Of parameters and buffers these hold how far the steps have moved them, so that a step that moves nothing is far
    from one that does. ``stored``: of those, the largest magnitude of what is kept, rounded each time it is written.
    """

    losses: tuple[float, ...]
    tensors: Mapping[str, Tensor]
    stored: Mapping[str, float] = field(default_factory=dict)


@dataclass
class Standard:
    """The step as it is, and how far it is from itself in other orders."""

    own: Trace
    precision: str
    noise: dict[str, float] = field(default_factory=dict)
    loss_noise: list[float] = field(default_factory=list)

    def difference(self, trace: Trace) -> str:
        """Say where ``trace`` is further away than the rule allows; ``""`` where it agrees."""
        part = _ALLOWED[self.precision]
        for step, (loss, found) in enumerate(zip(self.own.losses, trace.losses, strict=True)):
            allowed = max(NOISE_FACTOR * self.loss_noise[step], part / LOSS * abs(loss))
            both = math.isnan(loss) and math.isnan(found)
            if not (both or loss == found or _within(abs(loss - found), allowed)):
                return f"the loss of step {step + 1} is {found:.6g}, not {loss:.6g}: {allowed:.3g} is allowed"
        for name, own in self.own.tensors.items():
            got = trace.tensors.get(name)
            if got is None or got.shape != own.shape or got.dtype != own.dtype:
                return f"{name} is not what it was"
            distance = largest(own, got)
            floating = own.is_floating_point() or own.is_complex()
            allowed = max(NOISE_FACTOR * self.noise[name], part * largest_magnitude(own)) if floating else 0.0
            if name in self.own.stored:
                allowed = max(allowed, STORED * torch.finfo(own.dtype).eps * self.own.stored[name])
            if distance and not _within(distance, allowed):
                return f"{name} differs by {distance:.3g}, {allowed:.3g} is allowed"
        return ""


def standard(own: Trace, others: Iterable[Trace], precision: str) -> Standard:
    """Make the standard from a trace of the step as it is, and traces of it over samples in other orders.

    Of the others one is held at a time: each is as large as the model with its gradients.
    """
    made = Standard(own, precision, dict.fromkeys(own.tensors, 0.0), [0.0] * len(own.losses))
    for other in others:
        for name, tensor in own.tensors.items():
            made.noise[name] = max(made.noise[name], largest(tensor, other.tensors[name]))
        for step, loss in enumerate(own.losses):
            made.loss_noise[step] = max(made.loss_noise[step], abs(loss - other.losses[step]))
        del other  # before the next one is made
    return made


def _within(distance: float, allowed: float) -> bool:
    """Whether a difference is allowed. An infinite one never is: where as much would be, the step itself broke."""
    return math.isfinite(distance) and distance <= allowed
