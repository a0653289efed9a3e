"""What compared steps leave, on the CPU: losses, gradients, and how far parameters and buffers have moved."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from kway.proving.compare import largest_magnitude
from kway.strategies.engine import Engine
from kway.tuning.agreement import Trace

Tensor = torch.Tensor


@dataclass(frozen=True)
class Compared:
    """What compared steps left, and whether they drew random numbers."""

    trace: Trace
    drew: bool


def left_by(engine: Engine, before: Mapping[str, Tensor], losses: tuple[float, ...]) -> Compared:
    """Return what steps left that began with the state ``before`` and had these ``losses``."""
    after = on_cpu(engine.state())
    tensors = {name: _moved(value, before.get(name)) for name, value in after.items()}
    stored = {name: largest_magnitude(value) for name, value in after.items() if tensors[name] is not value}
    for name, parameter in engine.model.named_parameters():
        if parameter.grad is not None and not parameter.grad.is_sparse:
            tensors[f"gradient of {name}"] = parameter.grad.detach().to("cpu", copy=True)
    return Compared(Trace(losses, tensors, stored), engine.drew)


def on_cpu(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies of the tensors of a state."""
    return {name: value.detach().to("cpu", copy=True) for name, value in state.items()}


def _moved(after: Tensor, before: Tensor | None) -> Tensor:
    """Return how far a tensor of rounded numbers has moved; others, and what was not there before, as they are."""
    if before is None or before.shape != after.shape or not (after.is_floating_point() or after.is_complex()):
        return after
    return after - before
