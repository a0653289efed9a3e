"""What ``Job.penalty`` may return: one number, of the model alone."""

from typing import Any

import torch

from kway.errors import UsageError

Tensor = torch.Tensor


def one_number(penalty: Any) -> Tensor:
    """Return what a penalty gave as a scalar. Raises ``UsageError`` for all but one number."""
    # A container of one tensor would make a number of which the model's weights have no gradient.
    contained = isinstance(penalty, list | tuple)
    try:
        value = torch.as_tensor(0.0 if contained else penalty)
    except (TypeError, ValueError, RuntimeError):
        contained = True
    if contained:
        raise UsageError(
            f"the penalty is of type {type(penalty).__name__}",
            "it must be one number",
            "return a scalar tensor",
        )
    if value.numel() != 1:
        raise UsageError(
            f"the penalty has shape {tuple(value.shape)}",
            "it must be one number, added to the loss once",
            "add its elements up: .sum()",
        )
    return value.view(()) if value.dim() else value
