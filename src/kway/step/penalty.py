"""What ``Job.penalty`` may return: one number, of the model's weights alone."""

from typing import Any

import torch

from kway.errors import UsageError, text_of

Tensor = torch.Tensor
# In what torch says where a graph is gone through once more, whose numbers were let go.
_AGAIN = "backward through the graph a second time"


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


def add_gradients(penalty: Tensor) -> None:
    """Add the gradients of a scalar that has some. Raises ``UsageError`` for one that follows from a forward pass.

    Such a pass has gone backward by then, and its numbers were let go.
    """
    try:
        penalty.backward()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        if _AGAIN not in text_of(error):
            raise
    else:
        return
    raise UsageError(
        "the penalty follows from what was computed before: what the model's forward kept, such as an activation",
        "it must follow from the weights alone: it is computed once a step, when the batch has gone backward",
        "let the model return that with its output, and the loss add it for each sample",
    )
