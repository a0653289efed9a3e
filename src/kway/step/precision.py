"""Numeric precision of a run: dtypes, autocast, TF32 and the gradient scaler."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn

from kway.step.tf32 import tf32
from kway.units import counted


@dataclass(frozen=True)
class Precision:
    """``floating``: dtype that weights and real inputs are cast to, or ``None``. ``autocast``: its dtype."""

    name: str
    floating: torch.dtype | None = None
    autocast: torch.dtype | None = None
    tf32: bool = False

    def compute(self, device: torch.device) -> AbstractContextManager[object]:
        """Return the context for forward passes."""
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(device.type, self.autocast)

    def scaler(self, device: torch.device) -> torch.amp.GradScaler | None:
        """Return a gradient scaler where the range of float16 needs one."""
        if self.autocast != torch.float16:
            return None
        scaler = torch.amp.GradScaler(device.type)
        # It makes its scale with the first loss: a rank whose first loss is a constant would have none.
        scaler.scale(torch.zeros((), device=device))
        return scaler

    @contextmanager
    def flags(self, device: torch.device | None = None) -> Iterator[None]:
        """Set TF32 for matrix products and convolutions on ``device`` as this precision wants, restore it at the end.

        torch allows TF32 in convolutions by default, which is not what "fp32" says.
        """
        with tf32(self.tf32, device):
            yield


def overflowed(left_out: int, steps: int, has_schedule: bool) -> str:
    """Say that of ``steps`` some were left out, which a scaler does without a word."""
    schedule = ", and neither did the schedule" if has_schedule else ""
    return (
        f"{left_out:,} of {counted(steps, 'step')} {'was' if left_out == 1 else 'were'} left out, since gradients "
        f"overflowed float16: the weights did not move{schedule}; a few of the first steps are usual, while the scale "
        "of the loss is found, and precision bf16 needs none"
    )


def cast(model: nn.Module, floating: torch.dtype | None) -> nn.Module:
    """Cast a module's real tensors to ``floating`` in place and return it; ``None`` leaves it as it is.

    ``nn.Module.to`` would drop the imaginary part of complex tensors: they become as wide as ``floating``.
    """
    if floating is None:
        return model
    model._apply(lambda tensor: tensor.to(dtype=widened(tensor.dtype, floating)))  # type: ignore[no-untyped-call]
    return model


def widened(own: torch.dtype, floating: torch.dtype) -> torch.dtype:
    """Return the dtype that a tensor of dtype ``own`` gets where reals get ``floating``."""
    if own.is_complex:
        return torch.promote_types(own, floating)
    return floating if own.is_floating_point else own


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype, at least single precision, in which sums, counts and averages of ``dtype`` are kept."""
    return torch.promote_types(dtype, torch.float32)


_KNOWN = {
    "fp64": Precision("fp64", floating=torch.float64),
    "fp32": Precision("fp32"),
    "tf32": Precision("tf32", tf32=True),
    "bf16": Precision("bf16", autocast=torch.bfloat16),
    "fp16": Precision("fp16", autocast=torch.float16),
}


def precision_of(name: str) -> Precision:
    """Return the precision of a job; the name has been checked when the job was made."""
    return _KNOWN[name]
