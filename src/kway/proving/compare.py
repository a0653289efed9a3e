"""When two results count as the same, and how far apart they are."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from kway.proving.reference import Snapshot, largest

NOISE_FACTOR = 16
EPSILONS = 64
UNSTEADY = "the reference does not repeat itself"
MIXES = (
    "; on one device the same samples in another order give another loss: the model or its loss goes by the place of a "
    "sample in the batch, which devices change"
)


@dataclass
class Comparison:
    """What comparing the tensors of several steps gave. ``max_ulps`` counts units in the last place of each
    tensor's largest magnitude, over tensors that are not mostly noise in the reference itself. ``by_noise``: those of
    these that pass because the reference differs from itself as much, not by being that close.
    """

    tensors: int = 0
    equal_bits: bool = True
    passed: bool = True
    max_ulps: float = 0.0
    max_abs_diff: float = 0.0
    first_difference: dict[str, object] | None = None
    reason: str = ""
    noise_only: set[str] = field(default_factory=set)
    by_noise: set[str] = field(default_factory=set)
    _hint: str = field(default="", repr=False)

    def fail(self, step: int, tensor: str, reason: str) -> None:
        """Note a difference; the first one is kept."""
        self.passed = False
        if self.first_difference is None:
            self.first_difference = {"step": step, "tensor": tensor}
            self.reason = reason

    @property
    def equal(self) -> str:
        """``bits``, ``ulps`` or ``no``."""
        return ("bits" if self.equal_bits else "ulps") if self.passed else "no"

    def add(self, step: int, snapshot: Snapshot, got: Mapping[str, torch.Tensor]) -> None:
        """Compare every tensor of one step. A tensor passes when its largest difference is at most 16 times the
        reference's own noise, or 64 eps times its largest magnitude, whichever is larger; integers when equal.

        Where the reference does not repeat itself its noise is no rounding: nothing passes.
        """
        loss = snapshot.after.get("loss")
        if loss is not None and mostly_noise(loss, largest_magnitude(loss), snapshot.drift):
            self.equal_bits = False
            self.fail(
                step,
                "loss",
                f"{UNSTEADY}: the same batch from the same state gave losses that differ by "
                f"{snapshot.drift:.3g} at step {step}. The model draws random numbers, or keeps what changes its "
                "output outside parameters, buffers and plain attributes",
            )
        self._hint = MIXES if snapshot.mixes else ""
        for name in [*snapshot.after, *(name for name in got if name not in snapshot.after)]:
            self.tensors += 1
            if name not in got or name not in snapshot.after:
                who = (
                    "one device has it, the candidate has not" if name not in got else "one device has it not"
                )
                self.equal_bits = False
                self.fail(step, name, f"{name}: {who}, at step {step}")
                continue
            self._compare(step, name, snapshot.after[name], got[name], snapshot.noise[name])

    def _compare(self, step: int, name: str, own: torch.Tensor, got: torch.Tensor, noise: float) -> None:
        if own.shape != got.shape or own.dtype != got.dtype:
            self.equal_bits = False
            self.fail(
                step,
                name,
                f"{name}: {got.dtype} {tuple(got.shape)}, not {own.dtype} {tuple(own.shape)}, at step {step}",
            )
            return
        if torch.equal(own, got):
            return
        self.equal_bits = False
        difference = largest(own, got)
        magnitude = largest_magnitude(own)
        allowed = tolerance(own, magnitude, noise)
        if math.isfinite(difference):
            self.max_abs_diff = max(self.max_abs_diff, difference)
        if difference <= allowed and mostly_noise(own, magnitude, noise):
            self.noise_only.add(name)
        elif own.is_floating_point() or own.is_complex():
            self.max_ulps = max(self.max_ulps, ulps(own.dtype, magnitude, difference))
            if tolerance(own, magnitude, 0.0) < difference <= allowed:
                self.by_noise.add(name)
        # An infinite difference passes no test: where allowed is infinite too, the reference itself broke.
        if not (math.isfinite(difference) and difference <= allowed):
            self.fail(
                step,
                name,
                f"{name} differs by {difference:.3g} at step {step}, {allowed:.3g} is allowed{self._hint}",
            )


def largest_magnitude(own: torch.Tensor) -> float:
    """Return the largest finite magnitude of a tensor."""
    if not (own.is_floating_point() or own.is_complex()):
        return float(own.double().abs().max()) if own.numel() else 0.0
    finite = own.detach().abs()
    finite = finite[finite.isfinite()]
    return float(finite.max()) if finite.numel() else 0.0


def tolerance(own: torch.Tensor, magnitude: float, noise: float) -> float:
    """Return the largest difference that passes for a tensor with this magnitude and noise."""
    if not (own.is_floating_point() or own.is_complex()):
        return 0.0
    return max(NOISE_FACTOR * noise, EPSILONS * torch.finfo(own.dtype).eps * magnitude)


def mostly_noise(own: torch.Tensor, magnitude: float, noise: float) -> bool:
    """Whether half of the digits of a tensor are rounding noise in the reference itself.

    A bias before batch normalisation is an example: its gradient is zero in mathematics.
    """
    return own.is_floating_point() and noise > torch.finfo(own.dtype).eps ** 0.5 * magnitude


def ulps(dtype: torch.dtype, magnitude: float, difference: float) -> float:
    """Return a difference in units in the last place of ``magnitude`` for a floating-point dtype."""
    if math.isnan(difference) or math.isinf(difference) or not math.isfinite(magnitude):
        return math.inf
    info = torch.finfo(dtype)
    exponent = math.frexp(magnitude)[1] - 1 if magnitude else math.frexp(info.tiny)[1] - 1
    return difference / math.ldexp(info.eps, exponent)
