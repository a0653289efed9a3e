"""An optimizer in words: what of it decides what a step takes, and how much state it keeps."""

from typing import Any

import torch

# Numbers that a step computes with whatever they are, and ways to run it, which a step kind and settings choose.
_ANY_VALUE = ("lr", "betas", "eps", "alpha", "rho", "lr_decay", "lambd", "t0", "etas", "step_sizes")
_WAYS = ("foreach", "fused", "capturable", "differentiable")


def optimizer_text(optimizer: torch.optim.Optimizer) -> str:
    """Name the class of an optimizer and the options that are switched on: ``SGD with momentum, nesterov``.

    A learning rate is no such option: no step takes longer for a larger one. Those of all groups count.
    """
    defaults: dict[str, Any] = getattr(optimizer, "defaults", {})
    on = [
        name
        for name in defaults
        if name not in _ANY_VALUE + _WAYS and any(_is_on(group.get(name)) for group in optimizer.param_groups)
    ]
    name = type(optimizer).__name__
    return f"{name} with {', '.join(sorted(on))}" if on else name


def _is_on(value: Any) -> bool:
    return bool(value) if isinstance(value, bool | int | float) else value is not None
